"""Ranks that train with every fused optimizer in one pass and in two; see ``tests/distributed/test_mixing.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import ddpcore
from ddpcore import ops
from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD
from ddpcore.optim.weight_step import WeightStep
from helpers import ranks

STRATEGIES: dict[str, Any] = {
    "dpsgd": lambda: ddpcore.DPSGD(ddpcore.Ring()),
    "dpsgd_pairs": lambda: ddpcore.DPSGD(ddpcore.RandomPair(seed=0)),
    "local_sgd": lambda: ddpcore.LocalSGD(2),
    "slowmo": lambda: ddpcore.SlowMo(ddpcore.DPSGD(ddpcore.Ring()), period=2),
    "push_sum": lambda: ddpcore.PushSum(ddpcore.Ring()),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: FusedSGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: FusedAdamW(p, lr=0.01, max_grad_norm=1.0),
    "lars": lambda p: FusedLARS(p, lr=0.05, trust_coefficient=0.5),
    "lamb": lambda p: FusedLAMB(p, lr=0.01, weight_decay=0.01),
}
TRANSPORTS = ("pg", "shm")
CASES = [(s, o, t) for s in STRATEGIES for o in OPTIMIZERS for t in TRANSPORTS if s != "dpsgd_pairs" or t == "shm"]
STEPS = 5
mixed: list[str] = []  # the rules whose step had a mix


def train(strategy: str, optimizer: str, transport: str, rank: int) -> torch.Tensor:
    """The weights and states of this rank after some steps."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.Linear(70, 3))
    optim = OPTIMIZERS[optimizer](model.parameters())
    handle = ddpcore.distribute(
        model, optim, STRATEGIES[strategy](), connection=ddpcore.Connection(transport=transport)
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optim.zero_grad()
        handle.model(torch.randn(8, 5, generator=generator)).square().mean().backward()
        optim.step()
    values = [value for p in model.parameters() for name, value in sorted(optim.state[p].items()) if name != "step"]
    return torch.cat([tensor.detach().flatten() for tensor in (*model.parameters(), *values)])


def main() -> None:
    path, rank, _ = ranks.join()
    for name in OPTIMIZERS:
        operator = getattr(ops, f"{name}_step_")

        def watched(*args: Any, _name: str = name, _operator: Any = operator, **options: Any) -> None:
            mixed.extend([_name] * ("mixture" in options))
            _operator(*args, **options)

        setattr(ops, f"{name}_step_", watched)
    in_one = WeightStep._is_one_pass
    found = {}
    for case in CASES:
        mixed.clear()
        one = train(*case, rank)
        count = len(mixed)
        WeightStep._is_one_pass = lambda *_: False
        two = train(*case, rank)
        WeightStep._is_one_pass = in_one
        found[case] = (one, two, count, len(mixed) - count)
    torch.save(found, path)


if __name__ == "__main__":
    main()
