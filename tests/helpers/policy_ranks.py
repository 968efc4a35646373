"""Ranks of which some have no state of the optimizer yet, or other buffers; see ``test_policy_ranks.py``."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune

import ddpcore
from ddpcore import DPSGD, LocalSGD, Policies
from helpers import ranks

POLICIES: dict[str, tuple[Any, Policies]] = {
    "average": (lambda: LocalSGD(1), Policies(momentum="average")),
    "gossip": (lambda: DPSGD(ddpcore.Complete(), order="adapt_then_combine"), Policies(momentum="gossip")),
    "moments": (lambda: LocalSGD(1), Policies(moments={"momentum_buffer": 1})),
}
TRANSPORTS = ("pg", "shm")


def pull(model: nn.Module, rank: int, step: int) -> None:
    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank + 10 * step))
    model(inputs).square().mean().backward()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def stateless(rank: int, policy: str, transport: str) -> float:
    """Rank 1 has no batch in its first step: how far weights are from those of a loop over two plain models."""
    torch.manual_seed(0)
    model = nn.Linear(16, 1, bias=False)
    alone = [copy.deepcopy(model) for _ in range(2)]
    optimizer, own = sgd(model), [sgd(one) for one in alone]
    strategy, policies = POLICIES[policy]
    connection = ddpcore.Connection(transport=transport, timeout=60.0)
    ddpcore.distribute(model, optimizer, strategy(), policies=policies, connection=connection)
    for step in range(4):
        optimizer.zero_grad()
        if step or not rank:
            pull(model, rank, step)
        optimizer.step()
        for number, (one, plain) in enumerate(zip(alone, own, strict=True)):
            plain.zero_grad()
            if step or not number:
                pull(one, number, step)
            plain.step()
        weights = torch.stack([one.weight.detach() for one in alone]).mean(0)
        states = [plain.state[one.weight] for one, plain in zip(alone, own, strict=True)]
        moments = torch.stack([state.get("momentum_buffer", torch.zeros_like(weights)) for state in states]).mean(0)
        for one, state in zip(alone, states, strict=True):
            one.weight.data.copy_(weights)
            if "momentum_buffer" in state:
                state["momentum_buffer"].copy_(moments)
    return float((model.weight - alone[rank].weight).abs().max())


class Late(nn.Module):
    """A layer with the mean of its inputs as a float64 buffer, and another buffer after large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean.copy_(inputs.mean(0))
        if inputs.max() > 2 and not hasattr(self, "seen"):
            self.register_buffer("seen", inputs.max().repeat(2).double())
        return self.linear(inputs)


def buffers(rank: int, policy: str, transport: str, *, late: bool) -> tuple[str, torch.Tensor, bool]:
    """The error of a step and of the evaluation model, the buffer after it, and whether the weights stayed.

    If ``late``, rank 0 alone gets a further buffer in its first forward pass.
    """
    torch.manual_seed(0)
    model = Late()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    connection = ddpcore.Connection(transport=transport, timeout=60.0)
    policies = Policies(batch_norm=policy)
    handle = ddpcore.distribute(model, optimizer, DPSGD(), policies=policies, connection=connection)
    before = model.linear.weight.detach().clone()
    model(torch.full((4, 3), (3.0 if late else 1.0) if rank == 0 else -3.0)).square().mean().backward()
    errors = []
    for call in (optimizer.step, handle.evaluation_model):
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))
    return " ".join(errors), model.mean, torch.equal(before, model.linear.weight)


def pruned(rank: int, transport: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of what two pruned ranks compute with, each with one weight left; and what their average has."""
    model = nn.Linear(2, 1, bias=False)
    connection = ddpcore.Connection(transport=transport, timeout=60.0)
    handle = ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), DPSGD(), connection=connection)
    prune.custom_from_mask(model, "weight", torch.eye(2)[rank][None])
    first = model.weight_orig.detach().clone()
    with torch.no_grad():
        model.weight_orig.mul_(1 + rank)
    average: Any = handle.evaluation_model()
    return first * torch.tensor([0.5, 1.0]), (average.weight_orig * average.weight_mask).detach()


def main() -> None:
    path, rank, _ = ranks.join()
    found: dict[Any, Any] = {}
    for transport in TRANSPORTS:
        for policy in POLICIES:
            found[policy, transport] = stateless(rank, policy, transport)
        found["pruned", transport] = pruned(rank, transport)
        for policy in ("average", "gossip"):
            for late in (False, True):
                found[f"buffers {policy}", transport, late] = buffers(rank, policy, transport, late=late)
    torch.save(found, path)


if __name__ == "__main__":
    main()
