"""Interleaved timing: functions run alternately, A B A B, so that noise of the machine affects all equally."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

SHORTEST_SAMPLE = 2e-3  # seconds: short calls are repeated until a sample takes this long
FEWEST_SAMPLES = 3  # of each function, even if they take long
PAUSE_RATIO = 1.5  # length of a pause, divided by the time to launch the calls after it
LONGEST_PAUSE = 0.05  # seconds
CYCLES_PER_SECOND = 2e9  # of a GPU, approximately
LARGEST_COPY = 2**29  # bytes read and written: larger than any cache

Function = Callable[[], Any]


def seconds_of(function: Function, num_calls: int, device: str, *, pause: float = 0.0) -> float:
    """The mean time of ``num_calls`` calls in seconds; on ``cuda`` between two events of the stream.

    With ``pause`` a GPU is kept busy for about so many seconds while the host launches the calls. Then the time is the
    GPU's work, without the launches.
    """
    if device == "cuda":
        if pause:
            torch.cuda._sleep(round(pause * CYCLES_PER_SECOND))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(num_calls):
            function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / num_calls
    start = time.perf_counter()
    for _ in range(num_calls):
        function()
    return (time.perf_counter() - start) / num_calls


def interleaved(
    functions: Sequence[Function], device: str, repeats: int, seconds: float = math.inf, *, queued: bool = False
) -> list[list[float]]:
    """Samples (seconds a call) of each function, at most ``repeats``, taken alternately after a warm-up.

    No further round begins after ``seconds``; ``min(repeats, FEWEST_SAMPLES)`` rounds are always taken. With ``queued``
    it measures the work of a GPU, after a pause in which the host launches it. Otherwise it measures the time that a
    caller waits, which for short calls is the launch.
    """
    num_calls, how = [], []
    for function in functions:
        seconds_of(function, 1, device)
        start = time.perf_counter()
        num_calls.append(max(1, round(SHORTEST_SAMPLE / max(seconds_of(function, 1, device), 1e-9))))
        pause = min(LONGEST_PAUSE, PAUSE_RATIO * num_calls[-1] * (time.perf_counter() - start))
        how.append({"pause": pause} if queued and device == "cuda" else {})
    samples: list[list[float]] = [[] for _ in functions]
    start = time.perf_counter()
    for taken in range(repeats):
        if taken >= FEWEST_SAMPLES and time.perf_counter() - start > seconds:
            break
        for index, function in enumerate(functions):
            samples[index].append(seconds_of(function, num_calls[index], device, **how[index]))
    return samples


def copying(num_bytes: int, device: str) -> tuple[Function, int]:
    """A function that reads and writes about ``num_bytes`` in total (at most LARGEST_COPY), and the exact number.

    The source is initialized: allocated pages that were never written may all be one page of zeros in the cache.
    """
    source = torch.ones(max(1, min(num_bytes, LARGEST_COPY) // 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.numel()
