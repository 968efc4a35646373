"""Hessians along a small training run, and of data that ranks share: the same lines for real and virtual learners."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ddpcore
from ddpcore.diagnostics import DataLoss, Hessian, HessianStatistics
from ddpcore.optim import FusedSGD
from ddpcore.storage.json_lines import to_json
from helpers import noise_training

NUM_LEARNERS, STEPS = noise_training.NUM_LEARNERS, 6
STRATEGIES = ("ssgd", "local_sgd", "slowmo", "dpsgd", "dpsgd_atc", "dpsgd_stale")


def train(
    strategy: str, *, watched: bool, group: dist.ProcessGroup | None = None, transport: str = "auto"
) -> dict[str, Any]:
    """The weights and buffers at the end, ``[L, ...]``, and the records."""
    model = noise_training.model_of()
    model[3] = nn.Identity()  # dropout: ranks draw one by one, virtual learners in turn
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    virtual = group is None
    learners = NUM_LEARNERS if virtual else None
    handle = ddpcore.distribute(
        model, optimizer, noise_training.STRATEGIES[strategy](), learners=learners, group=group, transport=transport
    )
    held = range(NUM_LEARNERS) if virtual else [dist.get_rank(group)]

    def losses(step: int) -> Tensor:
        x, y = noise_training.batch(step)
        outputs = handle.model(x) if virtual else handle.model(x[held[0]])[None]
        return torch.stack([F.cross_entropy(outputs[row], y[j]) for row, j in enumerate(held)]).sum()

    statistics = HessianStatistics(handle, lambda: losses(-1), every=3, top=2, tolerance=1e-6) if watched else None
    for step in range(STEPS):
        optimizer.zero_grad()
        losses(step).backward()
        optimizer.step()
    assert handle.learner is not None
    return {
        "weights": [[p.detach().clone() for p in one.parameters()] for one in handle.models],
        "buffers": [[b.clone() for b in one.buffers()] for one in handle.models],
        "random": torch.rand(3),
        "bytes_sent": handle.learner.comm.bytes_sent,
        "records": [] if statistics is None else to_json(statistics.records),
    }


def of_data(group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """The products and eigenvalues of a mean over 13 samples, which ranks hold in unequal parts."""
    model = noise_training.model_of().double().eval()
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(13, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (13,), generator=generator)
    rank, num = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    own = slice(rank, None, num)
    batches = list(zip(inputs[own].split(2), labels[own].split(2), strict=True))
    hessian = Hessian(model, DataLoss(model, F.cross_entropy, batches, group=group), group=group)
    vectors = torch.randn(3, hessian.numel, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ends = hessian.eigenvalues(2, 1, tolerance=1e-8)
    return {"products": hessian.product(vectors), "values": torch.from_numpy(ends.values)}


def main() -> None:
    """As a script: one rank of three, over both transports."""
    from helpers.ranks import join

    path, _, _ = join()
    results: dict[Any, Any] = {"data": of_data(dist.group.WORLD)}
    for strategy in STRATEGIES:
        for transport in ("pg", "shm"):
            results[strategy, transport] = train(strategy, watched=True, group=dist.group.WORLD, transport=transport)
    torch.save(results, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
