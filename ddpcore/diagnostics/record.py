"""What is written down of a measured step, and the sums that it is made of.

Shapes: T steps, L learners held by this process, S segments.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddpcore.diagnostics.dynamics import Dynamics, Spread, dynamics
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
        self.batch_size, self._names = batch_size, names
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

    def state_dict(self) -> dict[str, Any]:
        """The steps that are kept, as tensors, and of how many learners."""
        kept = {
            name: [torch.from_numpy(row) for row in rows] for name, rows in (("own", self._own), ("mean", self._mean))
        }
        return {**kept, "num_learners": self._num_learners}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self._num_learners = state["num_learners"]
        for rows, known in ((self._own, state["own"]), (self._mean, state["mean"])):
            rows.clear()
            rows.extend(row.numpy() for row in known)

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
        return noise_scale(own_T, mean_T, num_learners=self._num_learners, batch_size=self.batch_size)


@dataclass
class Measured:
    """One record's tensors, on their device until somebody looks."""

    step: int
    num_learners: int
    own_TS: Tensor | None = None
    mean_TS: Tensor | None = None
    num_skipped: int = 0
    at_mean: bool = True
    products: Tensor | None = None  # of g_a, k and g
    lr: float = 0.0
    full_loss: Tensor | None = None
    hessian: Tensor | None = None
    distance: Tensor | None = None  # 1/n sum_j |w_j - w_a|^2
    eigenvalues: Tensor | None = None
    marks: tuple[torch.cuda.Event | float, ...] = ()

    def record(self, series: Series, full_loss_of: str) -> NoiseRecord:
        """As numbers; its steps join the series that the noise scale is an average of. Waits for the device."""
        skipped, num_new = self.num_skipped, 0
        if self.own_TS is not None and self.mean_TS is not None:
            own_TS, mean_TS = self.own_TS.cpu().numpy(), self.mean_TS.cpu().numpy()
            left_out = series.add(own_TS, mean_TS, self.num_learners)
            skipped, num_new = skipped + left_out, len(own_TS) - left_out
        moves, spread = None, None
        if self.products is not None:
            hessian = None if self.hessian is None else float(self.hessian)
            products = self.products.cpu()
            loss = float("nan") if self.full_loss is None else float(self.full_loss)
            moves = dynamics(products, self.lr, loss, hessian, self.num_learners, full_loss_of)
        if self.distance is not None:
            square = float(self.distance)
            values = () if self.eigenvalues is None else tuple(self.eigenvalues.clamp_min(0.0).tolist())
            spread = Spread(consensus_distance=square**0.5, trace=square / self.num_learners, eigenvalues=values)
        reason = TWO_BATCHES if self.num_learners < 2 else NO_STEP if num_new == 0 else ""
        if not reason and self.products is not None and not bool(self.products.isfinite().all()):
            reason = "a gradient of this step is not finite"
        last, begin, end = self.marks
        seconds, passed = Clock.between(begin, end), Clock.between(last, end)
        return NoiseRecord(
            step=self.step,
            valid=not reason,
            reason=reason,
            num_learners=self.num_learners,
            batch_size=series.batch_size,
            num_steps=len(series),
            num_skipped=skipped,
            at_mean=self.at_mean,
            whole=series.whole(),
            segments=series.segments(),
            dynamics=moves,
            spread=spread,
            seconds=seconds,
            share=seconds / passed if passed > 0 else 0.0,
        )
