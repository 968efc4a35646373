"""One small training run of each strategy: the same lines for real ranks and for virtual learners.

As a script: one rank of five, which runs all cases on groups of the first 1 to 5 ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ddpcore
from ddpcore.comm import base
from ddpcore.optim import FusedSGD

STEPS = 6
LARGEST = 5
TOPOLOGIES = ("complete", "ring", "random_pair", "one_peer_exponential", "from_matrix")
AVERAGES = ("all_gather", "all_reduce")  # how gloo carries them: small ones are gathered, large ones reduced


class Case(NamedTuple):
    strategy: str
    topology: str  # of dpsgd; of the others one of AVERAGES
    world_size: int
    optimizer: str

    def __str__(self) -> str:
        return "-".join(map(str, self))


CASES = [
    Case(strategy, topology, world_size, optimizer)
    for strategy, topologies in (("ssgd", AVERAGES), ("local_sgd", AVERAGES), ("dpsgd", TOPOLOGIES))
    for topology in topologies
    for world_size in range(1, LARGEST + 1)
    for optimizer in ("fused", "torch")
]


def mixing_matrix(n: int) -> np.ndarray:
    """Doubly stochastic and directed, all weights different: 0.5 of its own, 0.3 one behind, 0.2 two behind."""
    identity = np.eye(n)
    return 0.5 * identity + 0.3 * np.roll(identity, 1, axis=0) + 0.2 * np.roll(identity, 2, axis=0)


def strategy_of(case: Case) -> Any:
    if case.strategy == "ssgd":
        return ddpcore.SSGD()
    if case.strategy == "local_sgd":
        return ddpcore.LocalSGD(period=4)
    topology = {
        "complete": ddpcore.Complete(),
        "ring": ddpcore.Ring(1),
        "random_pair": ddpcore.RandomPair(seed=5),
        "one_peer_exponential": ddpcore.OnePeerExponential(),
        "from_matrix": ddpcore.FromMatrix(mixing_matrix(case.world_size)),
    }[case.topology]
    return ddpcore.DPSGD(topology)


def batch(step: int, num_learners: int) -> tuple[Tensor, Tensor]:
    """Another mini-batch for each learner at each step."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(LARGEST, 4, 5, generator=generator)
    labels = torch.randint(3, (LARGEST, 4), generator=generator)
    return inputs[:num_learners], labels[:num_learners]


GATHER_BYTES = base.GATHER_BYTES


def train(case: Case, group: dist.ProcessGroup | None = None, transport: str = "auto") -> dict[str, Any]:
    """What the learners held by this process end with: weights ``[L, P]``, losses ``[steps, L]``, and the averages."""
    base.GATHER_BYTES = 0 if case.topology == "all_reduce" else GATHER_BYTES
    real = group is not None
    rank = dist.get_rank(group) if real else 0
    torch.manual_seed(17 + rank)  # all must start from learner 0's weights
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    rule: dict[str, Any] = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.01}
    make = FusedSGD if case.optimizer == "fused" else torch.optim.SGD
    optimizer = make(model.parameters(), **rule)
    handle = ddpcore.distribute(
        model,
        optimizer,
        strategy_of(case),
        learners=None if real else case.world_size,
        group=group,
        transport=transport,
        vectorize=None if real else False,
        bucket_bytes=128,  # several buckets, cut inside tensors
        first_bucket_bytes=64,
    )
    held = [rank] if real else list(range(case.world_size))
    losses = []
    for step in range(STEPS):
        inputs, labels = batch(step, case.world_size)
        outputs = handle.model(inputs[rank])[None] if real else handle.model(inputs)
        each = torch.stack([F.cross_entropy(outputs[row], labels[j]) for row, j in enumerate(held)])
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        each.sum().backward()
        optimizer.step()
        losses.append(each.detach())
    sent = handle.learner.comm.bytes_sent
    average = torch.cat([parameter.detach().flatten() for parameter in handle.evaluation_model().parameters()])
    rows = [parameter.detach().reshape(len(held), -1) for parameter in model.parameters()]
    return {
        "weights": torch.cat(rows, dim=1).clone(),
        "losses": torch.stack(losses),
        "average": average,
        "consensus": handle.consensus_distance(),
        "bytes_sent": sent,
    }


def main() -> None:
    from ranks import join

    path, rank, world_size = join()
    groups = {n: dist.new_group(list(range(n))) for n in range(1, world_size + 1)}  # every rank takes part in each
    results = {}
    for case in CASES:
        if rank < case.world_size:
            for transport in ("pg", "shm"):
                results[tuple(case), transport] = train(case, groups[case.world_size], transport)
    torch.save(results, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
