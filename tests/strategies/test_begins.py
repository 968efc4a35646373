"""Learners that begin with different weights, as after a program has loaded a state into each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from helpers import ranks

N = 3


def run(strategy: ddpcore.Strategy, steps: int, *, different: bool = True) -> tuple[Tensor, Tensor]:
    """The weights ``[N, P]`` at the start and at the end, of steps whose gradients are zero."""
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=N)
    with torch.no_grad():
        for parameter in handle.model.parameters() if different else ():
            parameter.normal_()
    start = handle.learner.flat.param_LP.clone()
    for _ in range(steps):
        optimizer.zero_grad()
        (0 * handle.model(torch.ones(N, 2, 5))).sum().backward()
        optimizer.step()
    return start, handle.learner.flat.param_LP


@pytest.mark.parametrize(
    "make",
    [
        lambda: ddpcore.SlowMo(ddpcore.DPSGD(ddpcore.Ring()), period=2),
        lambda: ddpcore.LocalSGD(2, outer={"lr": 0.7, "momentum": 0.9}),
        lambda: ddpcore.LocalSGD(2, outer={"lr": 0.7}, fragments=2),
    ],
)
def test_outer_steps_begin_at_the_mean(make: Callable[[], ddpcore.Strategy]) -> None:
    """Each rank would take its own weights for those of all, and virtual learners those of learner 0."""
    for steps in (2, 8):
        start, end = run(make(), steps)
        torch.testing.assert_close(end, start.mean(dim=0).expand_as(end))


def test_ranks_agree() -> None:
    """A neighbour would take its own weights for those of a rank, and the difference would stay for ever."""
    seen = ranks.run("begin_ranks", 2)
    for name in seen[0]:
        mean = (seen[0][name][0] + seen[1][name][0]) / 2
        for rank in seen:
            torch.testing.assert_close(rank[name][1], mean, atol=1e-3, rtol=1e-3, msg=name)


@pytest.mark.parametrize("make", [lambda: ddpcore.SlowMo(period=2), lambda: ddpcore.LocalSGD(2, outer={"lr": 1.0})])
def test_equal_weights_keep_their_bits(make: Callable[[], ddpcore.Strategy]) -> None:
    """The mean of three equal numbers may be another one."""
    strategy = make()
    start, _ = run(strategy, 1, different=False)
    assert torch.equal(torch.cat(strategy.state_dict()["anchor"]["parts"]), start[0])
    assert not torch.equal(start.sum(dim=0) / 3, start[0])
