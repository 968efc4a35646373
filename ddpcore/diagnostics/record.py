"""What is written down of a measured step, and the sums that it is made of.

Shapes: T steps, L learners held by this process, S segments.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddpcore.diagnostics.dynamics import Dynamics, Spread
from ddpcore.diagnostics.estimates import Array, NoiseScale, noise_scale
from ddpcore.flat import Segment

TWO_BATCHES = "the estimate needs two batches: take more learners, or accumulate gradients over several backward passes"
NO_STEP = "no step since the last record had finite gradients of one batch a learner"


@dataclass(frozen=True, kw_only=True)
class NoiseRecord:
    """The statistics at one step.

    Attributes:
        step: optimizer steps taken, this one included.
        valid: whether the numbers mean anything; ``reason`` says why not.
        reason: empty where valid.
        num_learners: n, or of one device the backward passes of a step.
        batch_size: b, as it was given.
        num_steps: steps that the noise scale is an average over.
        num_skipped: steps left out since the last record, whose gradients were not finite or not one batch a learner.
        at_mean: whether those gradients were all taken at the mean weights; else each at its learner's own.
        whole: of all parameters.
        segments: of each, by name; empty with ``per_segment=False``.
        dynamics: None without ``full_loss``.
        spread: None where learners hold the same weights.
        seconds: that measuring took in this step, beyond what every step does.
        share: of the time since the last record, from 0 to 1.
    """

    step: int
    valid: bool
    reason: str
    num_learners: int
    batch_size: int
    num_steps: int
    num_skipped: int
    at_mean: bool
    whole: NoiseScale | None
    segments: dict[str, NoiseScale]
    dynamics: Dynamics | None
    spread: Spread | None
    seconds: float
    share: float


class Clock:
    """Times between marks, without waiting for the device until they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> torch.cuda.Event | float:
        """Now; on CUDA, where the current stream stands."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def between(begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
        """Seconds."""
        if isinstance(begin, float) or isinstance(end, float):
            assert isinstance(begin, float)
            assert isinstance(end, float)
            return end - begin
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Layout:
    """Where segments lie in a row, and which number each has, whatever their order of the day is."""

    def __init__(self, segments: Sequence[Segment], numel: int, names: Sequence[str], device: torch.device) -> None:
        self.segments = segments
        self.bounds = [*(segment.offset for segment in segments), numel]
        self._numbers = [names.index(segment.name) for segment in segments]
        self._device = device
        self._parts: dict[tuple[int, int], tuple[list[int], Tensor]] = {}

    def part(self, begin: int, end: int) -> tuple[list[int], Tensor]:
        """Of columns: bounds of the pieces of segments in them, counted from ``begin``, and the segments' numbers."""
        if (begin, end) not in self._parts:
            pieces = [
                (max(first, begin), min(last, end), number)
                for first, last, number in zip(self.bounds, self.bounds[1:], self._numbers, strict=False)
                if first < end and last > begin
            ]
            bounds = [0, *(last - begin for _, last, _ in pieces)]
            self._parts[begin, end] = bounds, torch.tensor([number for *_, number in pieces], device=self._device)
        return self._parts[begin, end]


class Series:
    """The last steps' sums, as numbers, from which an estimate is made.

    Args:
        num_steps: how many are kept.
        batch_size: b.
        names: of the segments; empty: only the whole.
    """

    def __init__(self, num_steps: int, batch_size: int, names: Sequence[str]) -> None:
        self._batch_size, self._names = batch_size, names
        self._own: deque[Array] = deque(maxlen=num_steps)
        self._mean: deque[Array] = deque(maxlen=num_steps)
        self._num_learners = 0

    def add(self, own_TS: Array, mean_TS: Array, num_learners: int) -> int:
        """Take further steps of so many learners; returns how many were left out, not being finite."""
        if num_learners != self._num_learners:
            self._own.clear()
            self._mean.clear()
            self._num_learners = num_learners
        finite_T = np.isfinite(own_TS).all(axis=1) & np.isfinite(mean_TS).all(axis=1)
        self._own.extend(own_TS[finite_T])
        self._mean.extend(mean_TS[finite_T])
        return int((~finite_T).sum())

    def __len__(self) -> int:
        return len(self._own)

    def whole(self) -> NoiseScale | None:
        """Of all segments together; None before the first step, or of one learner."""
        if not self._own or self._num_learners < 2:
            return None
        return self._scale(np.array(self._own).sum(axis=1), np.array(self._mean).sum(axis=1))

    def segments(self) -> dict[str, NoiseScale]:
        """Of each."""
        if not self._own or self._num_learners < 2 or not self._names:
            return {}
        own_TS, mean_TS = np.array(self._own), np.array(self._mean)
        return {name: self._scale(own_TS[:, s], mean_TS[:, s]) for s, name in enumerate(self._names)}

    def _scale(self, own_T: Array, mean_T: Array) -> NoiseScale:
        return noise_scale(own_T, mean_T, num_learners=self._num_learners, batch_size=self._batch_size)
