"""What is written down of a measured step.

Shapes: T steps, L learners held by this process, S segments.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddpcore.diagnostics.dynamics import Dynamics, Spread
from ddpcore.diagnostics.estimates import NoiseScale
from ddpcore.parameters.flat import Segment

Mark = torch.cuda.Event | float


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
        num_skipped: steps left out since the last record: gradients not finite, or not of one full batch a learner.
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

    def mark(self) -> Mark:
        """Now; on CUDA, where the current stream stands."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def between(begin: Mark, end: Mark) -> float:
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
