"""Signals that ask a run to stop: the first is noted, the second does what it did before."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from ddpcore.runtime.signals import StopSignal

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What the handlers that were there before a listener are given."""
    numbers: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: numbers.append(number)) for number in NUMBERS}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", NUMBERS)
@pytest.mark.parametrize("second", NUMBERS)
def test_the_second_signal_acts_at_once(first: signal.Signals, second: signal.Signals, heard: list[int]) -> None:
    with StopSignal() as listener:
        assert not listener.asked
        signal.raise_signal(first)
        assert (listener.asked, listener.name, heard) == (True, first.name, [])
        signal.raise_signal(second)
        assert heard == [second], "while the first is being waited for"
        assert listener.name == first.name
    signal.raise_signal(first)
    assert heard == [second, first], "and so it is afterwards"


def test_what_the_outer_one_has_heard_the_inner_one_knows(heard: list[int]) -> None:
    with StopSignal() as outer:
        signal.raise_signal(signal.SIGTERM)
        with StopSignal() as inner:
            assert (inner.asked, inner.name) == (True, "SIGTERM")
        inner.pass_on()
        assert heard == [], "it was heard once"
    with StopSignal() as after:
        assert outer.asked and not after.asked


def test_what_the_inner_one_has_heard_is_passed_on(heard: list[int]) -> None:
    with StopSignal() as outer:
        with StopSignal() as inner:
            signal.raise_signal(signal.SIGINT)
            assert inner.asked and not outer.asked
        inner.pass_on()
        assert outer.asked and heard == []
    outer.pass_on()
    assert heard == [signal.SIGINT]


def test_a_signal_that_was_ignored_stays_ignored(heard: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignal() as listener:
        signal.raise_signal(signal.SIGINT)
        assert not listener.asked
        signal.raise_signal(signal.SIGTERM)
        assert listener.name == "SIGTERM"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
