"""``check_strategy`` passes what is right and names what is wrong. test_oracle.py has ddpcore's own on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from ddpcore import DPSGD, SSGD, GASLoC, GradientTracking, LocalSGD, NoisySSGD, NoLoCo, PushSum, Ring, SlowMo, Strategy
from ddpcore.testing import Scenario, check_strategy
from helpers import own_parts

PLAIN = (Scenario(), Scenario(name="resumed", resume_at=3))


def test_real_ranks() -> None:
    """Processes of their own, which import the strategy by its name."""
    check_strategy(own_parts.MeanOfWeights, num_learners=(1, 2))


@pytest.mark.usefixtures("forked_ranks")
def test_all_scenarios() -> None:
    check_strategy(partial(DPSGD, Ring()), num_learners=(1, 2))


@pytest.mark.parametrize(
    "factory",
    [
        pytest.param(SSGD, id="ssgd"),
        pytest.param(partial(SlowMo, period=3), id="slowmo"),
        pytest.param(own_parts.Alternating, id="own"),
        pytest.param(GradientTracking, id="tracking"),
        pytest.param(partial(LocalSGD, 2), id="local_sgd", marks=pytest.mark.slow),
        pytest.param(NoisySSGD, id="noisy_ssgd", marks=pytest.mark.slow),
        pytest.param(partial(PushSum, Ring()), id="push_sum", marks=pytest.mark.slow),
        pytest.param(partial(NoLoCo, period=2), id="noloco", marks=pytest.mark.slow),
        pytest.param(partial(GASLoC, period=2), id="gasloc", marks=pytest.mark.slow),
        pytest.param(partial(LocalSGD, 2, switch_step=3), id="post_local", marks=pytest.mark.slow),
    ],
)
def test_virtual_learners(factory: Callable[[], Strategy]) -> None:
    check_strategy(factory, num_learners=(1, 3), transports=())


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (own_parts.KnowsItsRank, "2 learners, pg, plain: weights of learner 1 differ by"),
        (own_parts.ForgetsItsState, "2 virtual learners, resumed after step 3: weights of learner 0 differ by"),
        (own_parts.slow_local_sgd, "2 virtual learners, plain: traits.stays_identical is true and"),
        (own_parts.ChecksNothing, r"2 virtual learners: weights are sent and learner.check_sent\(\) is never called"),
        (own_parts.SaysNoPeriod, r"2 virtual learners: plan\(0\).weights is true and nothing is sent in that step"),
        (
            own_parts.AveragesGradientsAnyway,
            r"2 virtual learners: plan\(0\).gradients is 1, and the gradients of learners 0 and 1 are equal after",
        ),
        (
            own_parts.AveragesNoGradients,
            r"2 virtual learners: plan\(0\).gradients is 0, and the gradients of learners 0 and 1 differ after that",
        ),
        (own_parts.always_the_same, "returns the same strategy twice"),
    ],
)
def test_what_is_wrong_is_named(factory: Callable[[], Strategy], says: str) -> None:
    with pytest.raises(AssertionError, match=says) as caught:
        check_strategy(factory, num_learners=(2,), transports=("pg",), scenarios=PLAIN)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("forked_ranks")
def test_sharded_learners() -> None:
    check_strategy(own_parts.Alternating, num_learners=(2,), transports=("pg",), shards=2)
    with pytest.raises(AssertionError, match=r"2 learners of 2 shards, pg, plain: weights of learner \d differ by"):
        check_strategy(own_parts.ScalesByNorm, num_learners=(2,), transports=("pg",), scenarios=PLAIN[:1], shards=2)
    with pytest.raises(ValueError, match="shards is 3 and plain has batches of 4 samples: take 2 shards"):
        check_strategy(own_parts.MeanOfWeights, shards=3)


def test_gradients_of_groups_are_compared_with_the_plan() -> None:
    check_strategy(partial(LocalSGD, 2, group=2), num_learners=(4,), transports=())
    with pytest.raises(AssertionError, match=r"plan\(0\).gradients is 4, and .* learners 1 and 2 differ after"):
        check_strategy(own_parts.SaysLargerGroups, num_learners=(4,), transports=())
