"""One small training run under statistics: the same lines for real ranks and for virtual learners."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ddpcore
from ddpcore.diagnostics import NoiseStatistics
from ddpcore.optim import FusedSGD
from ddpcore.storage.json_lines import to_json

NUM_LEARNERS, STEPS, BATCH = 3, 12, 4

STRATEGIES: dict[str, Any] = {
    "ssgd": ddpcore.SSGD,
    "noisy_ssgd": lambda: ddpcore.NoisySSGD(0.05, seed=3),
    "noisy_ssgd_apart": lambda: ddpcore.NoisySSGD(0.05, seed=3, where="per_learner"),
    "local_sgd": lambda: ddpcore.LocalSGD(period=4),
    "post_local": lambda: ddpcore.LocalSGD(period=2, switch_step=6),
    "slowmo": lambda: ddpcore.SlowMo(ddpcore.DPSGD(ddpcore.Ring(1)), period=3),
    "dpsgd": lambda: ddpcore.DPSGD(ddpcore.Ring(1)),
    "dpsgd_atc": lambda: ddpcore.DPSGD(ddpcore.Ring(1), order="adapt_then_combine"),
    "dpsgd_cta": lambda: ddpcore.DPSGD(ddpcore.Ring(1), order="combine_then_adapt"),
    "dpsgd_stale": lambda: ddpcore.DPSGD(ddpcore.Ring(1), staleness=1),
}


def model_of() -> nn.Module:
    """With what a further forward pass could spoil: running statistics and random numbers."""
    torch.manual_seed(17)
    return nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Dropout(0.2), nn.Linear(9, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Another mini-batch for each learner at each step."""
    generator = torch.Generator().manual_seed(1000 + step)
    labels = torch.randint(3, (NUM_LEARNERS, BATCH), generator=generator)
    return torch.randn(NUM_LEARNERS, BATCH, 5, generator=generator), labels


def train(
    strategy: str,
    *,
    watched: bool,
    group: dist.ProcessGroup | None = None,
    transport: str = "auto",
    optimizer_class: Any = FusedSGD,
    dropout: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """The weights and buffers at the end, ``[L, ...]``, and the records."""
    model = model_of()
    if not dropout:  # ranks draw one by one, virtual learners in turn
        model[3] = nn.Identity()
    optimizer = optimizer_class(model.parameters(), lr=0.1, momentum=0.9)
    virtual = group is None
    handle = ddpcore.distribute(
        model,
        optimizer,
        STRATEGIES[strategy](),
        learners=NUM_LEARNERS if virtual else None,
        group=group,
        connection=ddpcore.Connection(transport=transport, bucket_bytes=128, first_bucket_bytes=64),
        vectorize=False if virtual else None,  # several,
    )
    held = range(NUM_LEARNERS) if virtual else [dist.get_rank(group)]
    torch.manual_seed(5)

    def losses(step: int) -> Tensor:
        x, y = batch(step)
        outputs = handle.model(x) if virtual else handle.model(x[held[0]])[None]
        return torch.stack([F.cross_entropy(outputs[row], y[j]) for row, j in enumerate(held)]).sum()

    now = 0
    statistics = None
    if watched:
        passes = {"loss": lambda: losses(now), "full_loss": lambda: losses(-1), "hessian": True, "directions": 2}
        statistics = NoiseStatistics(handle, optimizer, 3, batch_size=BATCH, **{**passes, **options})
    for now in range(STEPS):
        optimizer.zero_grad(set_to_none=now % 2 == 0)
        losses(now).backward()
        optimizer.step()
    assert handle.learner is not None
    weights = [[p.detach().flatten() for p in one.parameters()] for one in handle.models]
    buffers = [[b.flatten() for b in one.buffers() if b.is_floating_point()] for one in handle.models]
    return {
        "weights": torch.stack([torch.cat(tensors) for tensors in weights]),
        "buffers": torch.stack([torch.cat(tensors) for tensors in buffers]),
        "random": torch.rand(3),
        "bytes_sent": handle.learner.comm.bytes_sent,
        "records": [] if statistics is None else to_json(statistics.records),
    }


def main() -> None:
    """As a script: one rank of three, which trains over both transports."""
    from helpers.ranks import join

    path, _, _ = join()
    results = {}
    for strategy in STRATEGIES:
        for transport in ("pg", "shm"):
            for watched in (True, False):
                results[strategy, transport, watched] = train(
                    strategy, watched=watched, group=dist.group.WORLD, transport=transport, dropout=False
                )
    torch.save(results, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
