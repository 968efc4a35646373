"""A state that another number of learners loads: what all share goes on, and groups stay groups."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import nn

import ddpcore
from ddpcore.distributed.saved import load_run_state, run_state
from helpers.saved_ranks import flat


def _learners(num: int, make: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), make(), learners=num)


def _take_steps(handle: Any, steps: range, *, alike: bool) -> None:
    for step in steps:
        num = len(handle.models)
        inputs = torch.randn(1 if alike else num, 3, 4, generator=torch.Generator().manual_seed(step))
        for group in handle.learner.optimizer.param_groups:
            group["lr"] = 0.1 * (1 - step / 10)
        handle.learner.optimizer.zero_grad()
        handle.model(inputs.expand(num, 3, 4)).square().sum().backward()
        handle.learner.optimizer.step()


def test_what_all_learners_share_goes_on_with_another_number_of_them() -> None:
    """Learners with equal data are alike, so the run of four goes on in two and in six."""
    adapting = ddpcore.AdaptiveConsensus(power=1, start=0)
    makes: list[Any] = [
        lambda: ddpcore.DPSGD(ddpcore.Ring(), consensus=adapting),
        lambda: ddpcore.SlowMo(None, period=2, slow_momentum=0.9),
        lambda: ddpcore.SlowMo(ddpcore.DPSGD(ddpcore.Ring(), consensus=adapting), period=2, slow_momentum=0.9),
        lambda: ddpcore.LocalSGD(2, outer={"lr": 0.7, "momentum": 0.9}),
    ]
    for make in makes:
        four = _learners(4, make)
        _take_steps(four, range(6), alike=True)
        others = [_learners(num, make) for num in (2, 6)]
        for other in others:
            load_run_state(other, [run_state(four)])
        for one in (four, *others):
            _take_steps(one, range(6, 9), alike=True)
        states = [getattr(one.strategy, "base", None) or one.strategy for one in (four, *others)]
        assert len({state.state_dict().get("reference_lr") for state in states}) == 1
        for other in others:
            for weights in flat(other):
                torch.testing.assert_close(weights, flat(four)[0], msg=repr(four.strategy))


def test_groups_start_from_one_group() -> None:
    makes: list[Any] = [
        lambda: ddpcore.LocalSGD(100, group=2),
        lambda: ddpcore.DPSGD(ddpcore.Ring(), group=2),
        lambda: ddpcore.NoLoCo(ddpcore.Ring(), group=2, period=100),
    ]
    for make, (before, after) in product(makes, ((4, 6), (6, 4), (4, 8))):
        old, new = _learners(before, make), _learners(after, make)
        _take_steps(old, range(3), alike=False)
        load_run_state(new, [run_state(old)], weights="nearest")
        for group in range(after // 2):
            assert torch.equal(flat(new)[2 * group], flat(old)[2 * (group * (before // 2) // (after // 2))])
        _take_steps(new, range(3, 6), alike=False)
        assert all(torch.equal(*flat(new)[first : first + 2]) for first in range(0, after, 2))
