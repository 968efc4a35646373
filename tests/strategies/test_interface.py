"""What a strategy may define, and what its traits and its plan say."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import ddpcore
from ddpcore import ALL, Plan, Strategy, Traits
from ddpcore.optim import FusedSGD
from ddpcore.strategies.registry import STRATEGIES
from ddpcore.topology.regular import Ring

MOST_POINTS = 16


def points_of(strategy: type) -> list[str]:
    """Public methods and attributes that the class itself defines or declares."""
    names = {name for name in vars(strategy) if not name.startswith("_")} | set(
        vars(strategy).get("__annotations__", ())
    )
    return sorted(name for name in names if not name.startswith("_"))


def test_a_strategy_acts_at_few_points() -> None:
    assert len(points_of(Strategy)) <= MOST_POINTS, points_of(Strategy)


def test_each_point_is_used_by_a_strategy() -> None:
    made = [STRATEGIES.find(name) for name in ("ssgd", "dpsgd", "noisy_ssgd", "push_sum", "adpsgd", "noloco", "gasloc")]
    used = {name for one in made for kind in inspect.getmro(one) if kind is not Strategy for name in vars(kind)}
    used |= set(vars(ddpcore.SlowMo))
    assert set(points_of(Strategy)) <= used | {"topology"}  # which many set in their constructor


@pytest.mark.parametrize(
    ("plan", "averages", "covers", "at_mean"),
    [
        (Plan(), False, False, False),
        (Plan(ALL), True, True, True),
        (Plan(4), True, False, False),
        (Plan(ALL, shifted=True), True, True, False),
    ],
)
def test_what_a_plan_says(plan: Plan, averages: bool, covers: bool, at_mean: bool) -> None:
    assert (plan.averages_gradients, plan.covers_all_learners, plan.gradients_at_mean) == (averages, covers, at_mean)


@pytest.mark.parametrize("name", [name for name in STRATEGIES.names() if name not in ("ddp", "single")])
def test_plan_and_traits_agree(name: str) -> None:
    """Gradients are averaged in some step if and only if the traits say so; identical learners average all of them."""
    strategy = STRATEGIES.build(name, topology=Ring())
    plans = [strategy.plan(step) for step in range(120)]
    assert any(plan.averages_gradients for plan in plans) == strategy.traits.averages_gradients
    assert not strategy.traits.stays_identical or all(plan.covers_all_learners for plan in plans)
    assert any(plan.weights for plan in plans)
    assert plans == [strategy.plan(step) for step in range(120)]  # pure


class Apart(ddpcore.DPSGD):
    """A user's own strategy, which answers as those of ddpcore do."""

    name = "apart"
    traits = Traits(no_mean="apart does not train a mean", no_deaths="it cannot: take dpsgd", takes_closure=False)


def start(strategy: Strategy, **options: object) -> ddpcore.Distributed:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return ddpcore.distribute(model, FusedSGD(model.parameters(), lr=0.1), strategy, learners=3, **options)


def test_a_users_strategy_answers_everything() -> None:
    from ddpcore.diagnostics import NoiseStatistics

    handle = start(Apart(Ring()))
    with pytest.raises(ValueError, match="apart does not train a mean: take dpsgd"):
        NoiseStatistics(handle, handle.learner.optimizer, every=5, batch_size=4)
    with pytest.raises(ValueError, match="apart: it cannot: take dpsgd"):
        start(Apart(Ring()), connection=ddpcore.Connection(on_failure="shrink"))
    with pytest.raises(ValueError, match="apart does not train a mean"):
        start(Apart(Ring()), policies=ddpcore.Policies(momentum="gossip"))
    with pytest.raises(RuntimeError, match="apart takes no closure"):
        handle.learner.optimizer.step(lambda: None)


def test_outer_optimizers_are_compared_by_their_options() -> None:
    """Of a function only the name could be compared."""
    from ddpcore.comm.agreement import describe

    fast, slow = (ddpcore.LocalSGD(4, outer=lambda p, lr=lr: torch.optim.SGD(p, lr=lr)) for lr in (0.7, 0.1))
    assert describe(fast) != describe(slow)
    same = ddpcore.LocalSGD(4, outer={"lr": 0.7})
    assert same.outer_options == fast.outer_options
