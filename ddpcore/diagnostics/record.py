"""The record of a measured step, and how it is timed and indexed.

Shapes: T steps, L learners held by this process, S segments.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddpcore.diagnostics.dynamics import Dynamics, Spread
from ddpcore.diagnostics.estimates import NoiseScale
from ddpcore.parameters.flat import Segment

Mark = Any  # a torch.cuda.Event, or seconds


@dataclass(frozen=True, kw_only=True)
class NoiseRecord:
    """The statistics at one step.

    Attributes:
        step: number of optimizer steps, including this one.
        valid: whether the numbers are meaningful.
        reason: why they are not; empty if ``valid``.
        num_learners: n; on one device the number of backward passes of a step.
        batch_size: b, as given.
        num_steps: steps that the noise scale averages.
        num_skipped: steps left out since the last record: a gradient was not finite, or not of one full batch.
        at_mean: whether the gradients were computed at the mean weights; otherwise at each learner's own weights.
        whole: noise scale of all parameters.
        segments: noise scale of each parameter by name; empty with ``per_segment=False``.
        dynamics: None without ``full_loss``.
        spread: None if learners hold the same weights.
        seconds: time of measuring in this step, without the work that every step does.
        share: ``seconds`` divided by the time since the last record, from 0 to 1.
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


def mark_on(device: torch.device) -> Mark:
    """The current time; on CUDA an event of the current stream, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Seconds between two marks on one device, after waiting for the second."""
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


class Layout:
    """The columns of segments in a row, and the fixed number of each segment; their order in the row may change."""

    def __init__(self, segments: Sequence[Segment], numel: int, names: Sequence[str], device: torch.device) -> None:
        self.segments = segments
        self.bounds = [*(segment.offset for segment in segments), numel]
        self._numbers = [names.index(segment.name) for segment in segments]
        self._device = device
        self._parts: dict[tuple[int, int], tuple[list[int], Tensor]] = {}

    def part(self, begin: int, end: int) -> tuple[list[int], Tensor]:
        """Bounds of the segments in columns ``begin`` to ``end``, relative to ``begin``, and the segments' numbers."""
        if (begin, end) not in self._parts:
            pieces = [
                (max(first, begin), min(last, end), number)
                for first, last, number in zip(self.bounds, self.bounds[1:], self._numbers, strict=False)
                if first < end and last > begin
            ]
            bounds = [0, *(last - begin for _, last, _ in pieces)]
            self._parts[begin, end] = bounds, torch.tensor([number for *_, number in pieces], device=self._device)
        return self._parts[begin, end]
