"""Interleaved timing: what is compared runs in turn, A B A B, so that a noisy machine disturbs all alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

SHORTEST_SAMPLE = 2e-3  # seconds: short calls are repeated until a sample lasts as long
FEWEST_SAMPLES = 3  # of each, whatever the time that they take
PAUSE_RATIO = 1.5  # of a pause to the time in which the calls behind it are launched
LONGEST_PAUSE = 0.05  # seconds
CYCLES_PER_SECOND = 2e9  # of a GPU, about
LARGEST_COPY = 2**29  # bytes read and written: beyond any cache, and more says no more

Function = Callable[[], Any]


def seconds_of(function: Function, num_calls: int, device: str, *, pause: float = 0.0) -> float:
    """Mean time of a call, over one sample; on CUDA between two events of the stream.

    Args:
        function: is called.
        num_calls: so often.
        device: ``cpu`` or ``cuda``.
        pause: seconds, about, for which a GPU is kept busy first, while the calls queue up behind: then its own work is
            timed, and not how fast the host launches it.
    """
    if device == "cuda":
        if pause:
            torch.cuda._sleep(round(pause * CYCLES_PER_SECOND))
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
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
    """Samples of each function, taken in turn after a warm-up.

    Args:
        functions: what is compared.
        device: ``cpu`` or ``cuda``.
        repeats: samples of each, at most.
        seconds: no further round begins after this time; ``min(repeats, FEWEST_SAMPLES)`` rounds are always taken.
        queued: on CUDA time what the device does, behind a pause in which the host launches it; else what a caller
            waits for, which of short calls is the launching.
    """
    num_calls, how = [], []
    for function in functions:
        seconds_of(function, 1, device)
        start = time.perf_counter()
        once = seconds_of(function, 1, device)
        num_calls.append(max(1, round(SHORTEST_SAMPLE / max(once, 1e-9))))
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
    """A copy that reads and writes about as many bytes, at most LARGEST_COPY, and how many it does.

    The source is written first: pages that were only allocated may all be one page of zeros, which sits in cache.
    """
    source = torch.ones(max(1, min(num_bytes, LARGEST_COPY) // 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.numel()


def quantiles(values: Iterable[float]) -> dict[str, float]:
    """The 20th, 50th and 80th percentile, linear between neighbours, in the unit of the values. ValueError if none."""
    samples = np.fromiter(values, dtype=np.float64)
    if samples.size == 0:
        raise ValueError("quantiles: there are no values, give at least one")
    low, middle, high = np.quantile(samples, (0.2, 0.5, 0.8)).tolist()
    return {"p20": low, "p50": middle, "p80": high}
