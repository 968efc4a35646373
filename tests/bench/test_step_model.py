"""Step times from parts, computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ddpcore.bench.step_model import Compute, Step, Transfer, available_cores, predict, ready_shares

ARRIVALS = ((100, 0.25), (200, 0.5), (100, 1.0))
COMPUTE = Compute(forward=2.0, backward=4.0, update=1.0, cpu=0.0, arrivals=ARRIVALS)
BACKGROUND: dict[str, Any] = {"cores": 2, "background": True}
BLOCKING: dict[str, Any] = {"cores": 2, "background": False}


def transfers(*seconds: float, cpu: float = 0.0) -> list[Transfer]:
    return [Transfer(seconds=one, cpu=cpu) for one in seconds]


def messages(*seconds: float, cpu: float = 0.0) -> Step:
    return Step(messages=transfers(*seconds, cpu=cpu), sizes=[100, 200, 100])


def test_buckets_are_ready_when_their_last_gradient_is() -> None:
    assert ready_shares(ARRIVALS, [400]) == [1.0]
    assert ready_shares(ARRIVALS, [100, 200, 100]) == [0.25, 0.5, 1.0]
    assert ready_shares(ARRIVALS, [50, 50, 100, 200]) == [0.25, 0.25, 0.5, 1.0], "a parameter arrives as a whole"
    assert ready_shares(ARRIVALS, [101, 299]) == [0.5, 1.0]
    assert ready_shares(ARRIVALS, [220, 220]) == [0.5, 1.0], "padding stretches all messages equally"
    assert ready_shares(((1, 0.5), (1, 0.25)), [1, 1]) == [0.5, 0.5], "messages are sent in order"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((0.5, 0.5, 0.5), 7.5),  # the last starts with the end of backward, at 6
        ((1.5, 2.5, 1.0), 9.0),  # ready at 3 and 4: they end at 4.5 and 7, so the last is late
        ((0.1, 0.1, 0.0), 7.0),  # all hidden
    ],
)
def test_gradients_in_the_background(seconds: tuple[float, ...], expected: float) -> None:
    assert predict(COMPUTE, [messages(*seconds)], **BACKGROUND) == pytest.approx(expected)


def test_gradients_without_background_transfers_hide_nothing() -> None:
    assert predict(COMPUTE, [messages(0.5, 0.5, 0.5)], **BLOCKING) == pytest.approx(8.5)


def test_weights_that_are_sent_during_the_computation() -> None:
    (mix,) = transfers(0.25)
    for seconds, expected in ((5.0, 7.25), (6.0, 7.25), (9.0, 10.25)):
        step = Step(hidden=Transfer(seconds=seconds), after=mix)
        assert predict(COMPUTE, [step], **BACKGROUND) == pytest.approx(expected)
        assert predict(COMPUTE, [step], **BLOCKING) == pytest.approx(7.25 + seconds)


def test_an_average_in_one_of_four_steps() -> None:
    steps = [Step(), Step(), Step(), Step(after=Transfer(seconds=8.0))]
    assert predict(COMPUTE, steps, **BACKGROUND) == pytest.approx(9.0)


def test_gradients_of_groups_and_then_weights() -> None:
    both = Step(messages=transfers(0.5, 0.5, 0.5), sizes=[100, 200, 100], after=Transfer(seconds=2.0))
    assert predict(COMPUTE, [messages(0.5, 0.5, 0.5), both], **BACKGROUND) == pytest.approx((7.5 + 9.5) / 2)


def test_work_over_cores_is_a_bound() -> None:
    """Four ranks of 7 s on two cores take 14 s; each transfer adds its processor time."""
    busy = Compute(forward=4.0, backward=8.0, update=2.0, cpu=28.0, arrivals=ARRIVALS)
    assert predict(busy, [messages(0.5, 0.5, 0.5, cpu=1.0)], **BACKGROUND) == pytest.approx(15.5)
    exchange = Step(hidden=Transfer(seconds=3.0, cpu=5.0), after=Transfer(seconds=0.0))
    assert predict(busy, [exchange], **BACKGROUND) == pytest.approx(16.5)
    average = Step(after=Transfer(seconds=1.0, cpu=8.0))
    assert predict(busy, [Step(), Step(), Step(), average], **BACKGROUND) == pytest.approx(15.0)
    assert predict(busy, [exchange], cores=math.inf, background=True) == pytest.approx(14.0)


def test_available_cores() -> None:
    """A step of 7 s used 7 s of processor time: ranks with four threads get one core."""
    busy = Compute(forward=2.0, backward=4.0, update=1.0, cpu=7.0)
    assert available_cores(busy, 4, 4) == 1.0
    assert available_cores(busy, 4, 3) == 4, "ranks leave one core free"
    assert available_cores(Compute(forward=1.0, backward=1.0, update=0.0, cpu=9.0), 4, 8) == 4, (
        "at most the number of cores"
    )
    assert available_cores(COMPUTE, 4, 4) == 4
