"""Slow momentum against its equation, with local steps and with gossip."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ddpcore
from ddpcore import DPSGD, SSGD, LocalSGD, Ring, SlowMo
from ddpcore.strategies.compression import TopK
from helpers import training

N = 4


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 6, 4, generator=generator), torch.randn(N, 6, 2, generator=generator)


def trained(strategy: object, num_steps: int, lr: float = 0.01) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(1)
    inputs, targets = problem()
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=N, vectorize=False)
    start, seen = training.rows_of(handle, "weight").double(), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        (0.5 * (handle.model(inputs) - targets).square()).sum().backward()
        optimizer.step()
        schedule.step()
        seen.append(training.rows_of(handle, "weight").double())
    return start, seen


@pytest.mark.parametrize("gossip", [False, True])
def test_the_equation(gossip: bool) -> None:
    inputs, targets = (x.double() for x in problem())
    strategy = SlowMo(DPSGD(Ring()) if gossip else None, period=3, slow_momentum=0.6, slow_lr=0.8)
    w, seen = trained(strategy, 9)
    matrix = torch.from_numpy(Ring().matrix(0, N))
    anchor, momentum = w[0].clone(), torch.zeros_like(w[0])
    for step in range(9):
        lr = 0.01 * 0.9**step
        gradients = torch.einsum("jbo,jbi->joi", torch.einsum("jbi,joi->jbo", inputs, w) - targets, inputs)
        w = (torch.einsum("jk,koi->joi", matrix, w) if gossip else w) - lr * gradients
        if (step + 1) % 3 == 0:
            momentum = 0.6 * momentum + (anchor - w.mean(0)) / lr
            anchor = anchor - 0.8 * lr * momentum
            w = anchor.expand_as(w).clone()
        torch.testing.assert_close(seen[step], w, rtol=1e-5, atol=1e-5)


def test_without_slow_momentum_it_is_local_sgd() -> None:
    slow = trained(SlowMo(period=3, slow_momentum=0.0), 6)[1]
    local = trained(LocalSGD(3), 6)[1]
    torch.testing.assert_close(slow[-1], local[-1], rtol=1e-6, atol=1e-6)


def test_steps_that_average() -> None:
    assert [step for step in range(1, 9) if SlowMo(period=4).plan(step - 1).weights] == [4, 8]
    assert all(SlowMo(DPSGD(), period=4).plan(step - 1).weights for step in range(1, 9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 0}, "period is 0"),
        ({"slow_momentum": 1.0}, "slow_momentum is 1.0: it must be at least 0 and below 1"),
        ({"slow_lr": 0.0}, "slow_lr is 0.0"),
        ({"base": DPSGD(Ring(), staleness=1)}, "staleness 0"),
        ({"base": SSGD()}, r"base is SSGD\(.*\): take gossip, a DPSGD, or None"),
        ({"base": LocalSGD(4)}, r"base is LocalSGD\(.*\): take gossip"),
        ({"base": DPSGD(Ring(), compression=TopK())}, "differences by topk, which do not include the slow step"),
    ],
)
def test_impossible_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlowMo(**options)


def test_a_rate_of_zero_is_an_error() -> None:
    with pytest.raises(ValueError, match="divides by the learning rate"):
        trained(SlowMo(period=1), 1, lr=0.0)
