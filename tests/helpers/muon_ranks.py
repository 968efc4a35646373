"""One of two real ranks that train with Muon; the weights after each way of training are saved."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ddpcore
from ddpcore.optim import Muon, matrices, param_groups
from helpers.connection import connected
from helpers.ranks import join

STEPS = 5
LEARNERS = 2


def build() -> tuple[nn.Module, Muon]:
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(),
        nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 4),
    )  # fmt: skip
    return model, Muon(param_groups(model, 0.01, rule="muon"), lr=0.02, adamw_lr=3e-3)


def samples(step: int) -> tuple[Tensor, Tensor]:
    """Of all learners: ``[LEARNERS, 8, ...]``."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(LEARNERS, 8, 2, 4, 4, generator=generator)
    return inputs, torch.randint(4, (LEARNERS, 8), generator=generator)


def muloco() -> ddpcore.LocalSGD:
    """Muon on each learner, Nesterov's momentum on the average (Therien et al. 2025)."""
    return ddpcore.LocalSGD(period=2, outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True))


def train(strategy: Any, rank: int, *, shared: bool = True, **options: Any) -> dict[str, Any]:
    model, optimizer = build()
    handle = ddpcore.distribute(model, optimizer, strategy, **connected(**options))
    if not shared:
        optimizer.process_group = None
    counts, real = [], matrices.orthogonalize
    matrices.orthogonalize = lambda matrices, **more: (counts.append(len(matrices)), real(matrices, **more))[1]
    try:
        for step in range(STEPS):
            inputs, labels = samples(step)
            optimizer.zero_grad()
            F.cross_entropy(handle.model(inputs[rank]), labels[rank]).backward()
            optimizer.step()
    finally:
        matrices.orthogonalize = real
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"weights": weights, "counts": sum(counts), "group": optimizer.process_group is not None}


def virtual() -> list[dict[str, Tensor]]:
    """MuLoCo on virtual learners."""
    model, optimizer = build()
    handle = ddpcore.distribute(model, optimizer, muloco(), learners=LEARNERS, vectorize=False)
    for step in range(STEPS):
        inputs, labels = samples(step)
        optimizer.zero_grad()
        outputs = handle.model(inputs)
        sum(F.cross_entropy(outputs[j], labels[j]) for j in range(LEARNERS)).backward()
        optimizer.step()
    return [{name: p.detach().clone() for name, p in one.named_parameters()} for one in handle.models]


def refusal() -> str:
    model, optimizer = build()
    optimizer.process_group = dist.group.WORLD
    try:
        ddpcore.distribute(model, optimizer, muloco())
    except ValueError as error:
        return str(error)
    return "no error"


def main() -> None:
    path, rank, _ = join()
    seen = {
        "shm": train(ddpcore.SSGD(), rank, transport="shm"),
        "pg": train(ddpcore.SSGD(), rank, transport="pg"),
        "ddp": train(ddpcore.DDP(), rank),
        "each": train(ddpcore.SSGD(), rank, transport="pg", shared=False),
        "muloco": train(muloco(), rank),
        "refusal": refusal(),
    }
    torch.save(seen, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
