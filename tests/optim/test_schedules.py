"""Schedules against values worked out by hand, and torch's own schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddpcore.optim import FusedSGD, Muon, schedules


def torch_rates(
    make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler], lr: float
) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = make(optimizer)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_linear_scaling_and_constant() -> None:
    assert schedules.linear_scaling(0.1, 8192, 256) == pytest.approx(3.2)
    assert schedules.linear_scaling(0.1, 128, 256) == pytest.approx(0.05)
    assert [schedules.constant(0.3)(step) for step in (0, 1, 10**9)] == [0.3] * 3


def test_warmup_ramps_and_then_follows_the_schedule() -> None:
    ramp = schedules.warmup(schedules.constant(0.8), 4)
    assert [ramp(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    inner = schedules.cosine(1.0, 10)
    ramp = schedules.warmup(inner, 5)
    assert ramp(1) == pytest.approx(inner(1) * 2 / 5)
    assert [ramp(step) for step in range(5, 12)] == [inner(step) for step in range(5, 12)]
    assert [schedules.warmup(inner, 0)(step) for step in range(12)] == [inner(step) for step in range(12)]
    ramp = schedules.warmup(schedules.constant(0.8), 4, start=0.25)
    assert [ramp(step) for step in range(6)] == pytest.approx([0.35, 0.5, 0.65, 0.8, 0.8, 0.8])


def test_cosine() -> None:
    schedule = schedules.cosine(0.4, 10)
    assert [schedule(step) for step in (0, 5, 10, 11, 10**6)] == pytest.approx([0.4, 0.2, 0, 0, 0], abs=1e-15)
    assert schedule(3) == pytest.approx(0.2 * (1 + math.cos(0.3 * math.pi)))
    expected = torch_rates(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20), 0.4)
    assert [schedules.cosine(0.4, 20)(step) for step in range(20)] == pytest.approx(expected)


def test_step_decay() -> None:
    schedule = schedules.step_decay(1.0, [3, 5], 0.1)
    assert [schedule(step) for step in range(7)] == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01, 0.01])
    expected = torch_rates(lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 11], 0.5), 0.7)
    assert [schedules.step_decay(0.7, (4, 11), 0.5)(step) for step in range(20)] == pytest.approx(expected)
    assert schedules.step_decay(0.7, [])(100) == 0.7


def test_step_decay_keeps_its_own_milestones() -> None:
    milestones = [3]
    schedule = schedules.step_decay(1.0, milestones, 0.5)
    milestones.clear()
    assert schedule(3) == 0.5


def test_exponential() -> None:
    expected = torch_rates(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), 0.7)
    assert [schedules.exponential(0.7, 0.9)(step) for step in range(20)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.constant(-0.1), "learning rate is -0.1"),
        (lambda: schedules.constant(math.nan), "learning rate is nan"),
        (lambda: schedules.cosine(math.inf, 3), "learning rate is inf"),
        (lambda: schedules.exponential(-1, 0.9), "learning rate"),
        (lambda: schedules.step_decay(-1, [1]), "learning rate"),
        (lambda: schedules.linear_scaling(-1, 1, 1), "learning rate"),
        (lambda: schedules.linear_scaling(0.1, 0, 256), "batch sizes"),
        (lambda: schedules.linear_scaling(0.1, 256, 0), "batch sizes"),
        (lambda: schedules.warmup(schedules.constant(1), -1), "num_steps is -1"),
        (lambda: schedules.warmup(schedules.constant(1), 1, 1.5), "start is 1.5"),
        (lambda: schedules.cosine(1, 0), "num_steps is 0"),
        (lambda: schedules.step_decay(1, [5, 3]), "ascending"),
        (lambda: schedules.step_decay(1, [5, 5]), "ascending"),
        (lambda: schedules.step_decay(1, [-1, 5]), "ascending"),
        (lambda: schedules.step_decay(1, [5], 0), "gamma is 0"),
        (lambda: schedules.exponential(1, 1.5), "gamma is 1.5"),
        (lambda: schedules.exponential(1, math.nan), "gamma is nan"),
    ],
)
def test_impossible_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [FusedSGD, Muon])
def test_groups_that_are_given_one_tensor_have_rates_of_their_own(make: Any) -> None:
    """Schedulers of torch write into the tensors, so the last group's rate would be that of all."""
    groups = [{"params": [torch.ones(2, 2, requires_grad=True)]} for _ in range(2)]
    rate = torch.tensor(0.5)
    optimizer = make(groups, lr=rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5**step])
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.125]
    assert optimizer.param_groups[0]["lr"] is rate
