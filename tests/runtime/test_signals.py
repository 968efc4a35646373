"""Signals that ask a run to stop: the first is recorded, the second has its previous effect."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from ddpcore.runtime.launch import StopSignal

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def received() -> Iterator[list[int]]:
    """The signals that the previous handlers received."""
    numbers: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: numbers.append(number)) for number in NUMBERS}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", NUMBERS)
@pytest.mark.parametrize("second", NUMBERS)
def test_the_second_signal_acts_at_once(first: signal.Signals, second: signal.Signals, received: list[int]) -> None:
    with StopSignal() as listener:
        assert not listener.asked
        signal.raise_signal(first)
        assert (listener.asked, listener.name, received) == (True, first.name, [])
        signal.raise_signal(second)
        assert received == [second], "inside the context"
        assert listener.name == first.name
    signal.raise_signal(first)
    assert received == [second, first], "after the context"


def test_an_inner_listener_inherits_the_signal_of_the_outer_one(received: list[int]) -> None:
    with StopSignal() as outer:
        signal.raise_signal(signal.SIGTERM)
        with StopSignal() as inner:
            assert (inner.asked, inner.name) == (True, "SIGTERM")
        inner.pass_on()
        assert received == [], "the signal was received once"
    with StopSignal() as after:
        assert outer.asked and not after.asked


def test_a_signal_of_the_inner_listener_is_passed_on(received: list[int]) -> None:
    with StopSignal() as outer:
        with StopSignal() as inner:
            signal.raise_signal(signal.SIGINT)
            assert inner.asked and not outer.asked
        inner.pass_on()
        assert outer.asked and received == []
    outer.pass_on()
    assert received == [signal.SIGINT]


def test_what_follows_a_signal(received: list[int]) -> None:
    """It is called once: by the handler, or at the start if the outer listener has received the signal."""
    calls: list[str] = []
    with StopSignal(lambda: calls.append("outer")):
        signal.raise_signal(signal.SIGTERM)
        assert calls == ["outer"]
        with StopSignal(lambda: calls.append("inner")):
            assert calls == ["outer", "inner"]
        signal.raise_signal(signal.SIGTERM)
    assert calls == ["outer", "inner"] and received == [signal.SIGTERM]


def test_a_signal_that_was_ignored_stays_ignored(received: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignal() as listener:
        signal.raise_signal(signal.SIGINT)
        assert not listener.asked
        signal.raise_signal(signal.SIGTERM)
        assert listener.name == "SIGTERM"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
