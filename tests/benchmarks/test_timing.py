"""What is called how often and in which order; no time is measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timing
import torch


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Samples last as long as is said here; what was sampled, with how many calls. The clock adds them up."""
    seen: list[tuple[str, int]] = []
    clock = [0.0]
    lasts = {"short": 1e-4, "long": 1.0}

    def seconds_of(function: Callable[[], str], num_calls: int, device: str) -> float:
        name = function()
        seen.append((name, num_calls))
        clock[0] += lasts[name] * num_calls
        return lasts[name]

    monkeypatch.setattr(timing, "seconds_of", seconds_of)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    return seen


def test_in_turn_after_a_warm_up(played: list[tuple[str, int]]) -> None:
    """Short calls are repeated until a sample lasts SHORTEST_SAMPLE."""
    samples = timing.interleaved([lambda: "short", lambda: "long"], "cpu", repeats=4)
    assert samples == [[1e-4] * 4, [1.0] * 4]
    assert played[:4] == [("short", 1), ("short", 1), ("long", 1), ("long", 1)]
    assert played[4:] == [("short", 20), ("long", 1)] * 4


@pytest.mark.parametrize(("repeats", "seconds", "taken"), [(21, 4.5, 5), (21, 0.1, 3), (2, 0.1, 2), (21, 1e9, 21)])
def test_time_ends_it(played: list[tuple[str, int]], repeats: int, seconds: float, taken: int) -> None:
    assert len(timing.interleaved([lambda: "long"], "cpu", repeats, seconds)[0]) == taken


@pytest.mark.parametrize(("device", "queued"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_calls_queue_up_behind_a_pause(device: str, queued: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the warm-up, on a GPU, where it is asked for: longer than the launching takes, and never very long."""
    pauses: list[float] = []
    clock = [0.0]

    def seconds_of(function: Callable[[], float], num_calls: int, device: str, *, pause: float = 0.0) -> float:
        clock[0] += function() * num_calls
        pauses.append(pause)
        return 1e-3

    monkeypatch.setattr(timing, "seconds_of", seconds_of)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    timing.interleaved([lambda: 1e-4, lambda: 1.0], device, 2, queued=queued)
    assert pauses[:4] == [0.0] * 4
    expected = [2 * 1e-4 * timing.PAUSE_RATIO, timing.LONGEST_PAUSE] if queued and device == "cuda" else [0.0, 0.0]
    assert pauses[4:] == pytest.approx(expected * 2)


def test_every_call_is_made() -> None:
    calls: list[int] = []
    assert timing.seconds_of(lambda: calls.append(1), 7, "cpu") >= 0
    assert len(calls) == 7


@pytest.mark.parametrize(("asked", "done"), [(1000, 1000), (1, 2), (2 * timing.LARGEST_COPY, timing.LARGEST_COPY)])
def test_copies_are_capped(asked: int, done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LARGEST_COPY", min(timing.LARGEST_COPY, 4000))
    copy, num_bytes = timing.copying(asked, "cpu")
    assert num_bytes == min(done, 4000)
    assert (copy() == 1).all(), "the source was written"


@pytest.mark.cuda
def test_events(device: torch.device) -> None:
    copy, _ = timing.copying(1 << 20, device.type)
    assert timing.seconds_of(copy, 3, device.type) > 0
