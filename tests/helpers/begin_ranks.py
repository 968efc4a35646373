"""Ranks that begin with different weights; see ``tests/strategies/test_begins.py``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddpcore
from helpers import ranks

STRATEGIES: dict[str, Any] = {
    "slowmo": (lambda: ddpcore.SlowMo(ddpcore.DPSGD(ddpcore.Ring()), period=2), 8),
    "outer": (lambda: ddpcore.LocalSGD(2, outer={"lr": 0.7, "momentum": 0.9}), 8),
    "topk": (lambda: ddpcore.DPSGD(ddpcore.Ring(), compression="topk"), 200),
    "int8": (lambda: ddpcore.DPSGD(ddpcore.Ring(), compression={"name": "int8", "error_feedback": True}), 40),
}


#: the outer step is 0.5 times the change of the first round
DECAYED: dict[str, Any] = {
    "outer": lambda: ddpcore.LocalSGD(2, outer={"lr": 0.5}),
    "noloco": lambda: ddpcore.NoLoCo(ddpcore.Complete(), period=2, outer_lr=0.5, outer_momentum=0.0),
    "gasloc": lambda: ddpcore.GASLoC(ddpcore.Complete(), period=2, outer_lr=0.5, outer_momentum=0.0),
    "slowmo": lambda: ddpcore.SlowMo(None, period=2, slow_momentum=0.0, slow_lr=0.5),
}


class Two(nn.Linear):
    """Returns an output before the one in the loss."""

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = super().forward(input)
        return output.mean(), output


def train(
    strategy: ddpcore.Strategy, steps: int, rank: int, *, decays: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of this rank before and after steps whose gradients are zero.

    If it ``decays``, rank 0 halves its weights before its first step, in which rank 1 has no pass.
    """
    model = Two(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddpcore.distribute(model, optimizer, strategy)
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for step in range(steps):
        optimizer.zero_grad()
        if not (decays and rank and step == 0):
            (0 * model(torch.ones(2, 5))[1]).sum().backward()
        if decays and rank == step == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        optimizer.step()
    return before, torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def main() -> None:
    path, rank, _ = ranks.join()
    found = {name: train(make(), steps, rank) for name, (make, steps) in STRATEGIES.items()}
    found |= {f"decayed {name}": train(make(), 2, rank, decays=True) for name, make in DECAYED.items()}
    torch.save(found, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
