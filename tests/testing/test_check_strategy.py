"""``check_strategy`` passes what is right and names what is wrong. test_oracle.py has ddpcore's own on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from ddpcore import DPSGD, SSGD, GASLoC, LocalSGD, NoisySSGD, NoLoCo, PushSum, Ring, SlowMo, Strategy
from ddpcore.testing import Scenario, check_strategy
from helpers import own_parts

PLAIN = (Scenario(), Scenario(name="resumed", resume_at=3))


@pytest.mark.parametrize("factory", [partial(DPSGD, Ring()), own_parts.MeanOfWeights], ids=["dpsgd", "own"])
def test_real_ranks(factory: Callable[[], Strategy]) -> None:
    check_strategy(factory, num_learners=(1, 2))


@pytest.mark.parametrize(
    "factory",
    [
        *(SSGD, partial(LocalSGD, 2), NoisySSGD, partial(SlowMo, period=3), partial(PushSum, Ring())),
        *(partial(NoLoCo, period=2), partial(GASLoC, period=2)),
    ],
    ids=["ssgd", "local_sgd", "noisy_ssgd", "slowmo", "push_sum", "noloco", "gasloc"],
)
def test_virtual_learners(factory: Callable[[], Strategy]) -> None:
    check_strategy(factory, num_learners=(1, 3), transports=())


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (own_parts.KnowsItsRank, "2 learners, pg, plain: weights of learner 1 differ by"),
        (own_parts.ForgetsItsState, "2 virtual learners, resumed after step 3: weights of learner 0 differ by"),
        (own_parts.slow_local_sgd, "2 virtual learners, plain: traits.stays_identical is true and"),
        (own_parts.ChecksNothing, r"2 virtual learners: weights are sent and learner.check_sent\(\) is never called"),
        (own_parts.SaysNoPeriod, r"2 virtual learners: plan\(0\).weights is true and nothing is sent in that step"),
        (own_parts.always_the_same, "returns the same strategy twice"),
    ],
)
def test_what_is_wrong_is_named(factory: Callable[[], Strategy], says: str) -> None:
    with pytest.raises(AssertionError, match=says) as caught:
        check_strategy(factory, num_learners=(2,), transports=("pg",), scenarios=PLAIN)
    assert "\n" not in str(caught.value)
