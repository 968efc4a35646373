"""A state that another number of learners loads: what all share goes on, and groups stay groups."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ddpcore
from ddpcore import RunState
from ddpcore.distributed.saved import load_run_state, run_state
from helpers.saved_ranks import flat

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _learners(num: int, make: Any, *gone: int) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    more = {"connection": ddpcore.Connection(on_failure="shrink")} if gone else {}
    handle = ddpcore.distribute(model, optimizer, make(), learners=num, **more)
    for one in gone:
        handle.lose(one)
    return handle


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


@pytest.mark.slow
def test_learners_that_are_left_load_their_own_state(tmp_path: Path) -> None:
    """Into the same handle, and into a new one whose learner has died too, perhaps before the first operation."""
    makes: list[Any] = [
        lambda: ddpcore.DPSGD(ddpcore.Ring()),
        lambda: ddpcore.PushSum(ddpcore.OnePeerExponential()),
        lambda: ddpcore.LocalSGD(2, outer={"lr": 0.7, "momentum": 0.9}),
    ]
    for number, make in enumerate(makes):
        handle, folder = _learners(4, make, 2), tmp_path / str(number)
        _take_steps(handle, range(3), alike=False)
        dcp.save({"run": RunState(handle)}, checkpoint_id=folder)
        state = run_state(handle)
        _take_steps(handle, range(3, 6), alike=False)
        ends = flat(handle)
        dcp.load({"run": RunState(handle, saved=folder)}, checkpoint_id=folder)
        others = [handle, _learners(4, make, 2), _learners(4, make, 2)]
        others[1].consensus_distance()
        for other in others[1:]:
            load_run_state(other, [state])
        for other in others:
            _take_steps(other, range(3, 6), alike=False)
            assert other.comm.members == (0, 1, 3) and other.deals == handle.deals
            assert all(torch.equal(flat(other)[one], ends[one]) for one in (0, 1, 3))
        for other in (_learners(4, make), _learners(4, make, 1), _learners(4, make, 1, 2)):
            with pytest.raises(ValueError, match=r"state is of learners \[0, 1, 3\]"):
                load_run_state(other, [state])
            with pytest.raises(ValueError, match=r"state is of learners \[0, 1, 3\]"):
                other.load_state_dict(state["handle"])
        for num in (2, 3):
            with pytest.raises(ValueError, match="no plain average here"):
                load_run_state(_learners(num, make), [state])
