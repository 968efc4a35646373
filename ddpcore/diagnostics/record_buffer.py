"""A buffer of measured steps, and their conversion into records.

Shapes: T steps, S segments.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ddpcore.diagnostics.dynamics import Dynamics, Spread, dynamics_of
from ddpcore.diagnostics.record import Mark, NoiseRecord, mark_on, seconds_between
from ddpcore.diagnostics.series import Series

TWO_BATCHES = "the estimate needs two batches: take more learners, or accumulate gradients over several backward passes"
NO_STEP = "no step since the last record had finite gradients of one full batch a learner"
NOT_FINITE = "a gradient of this step is not finite"
UNEQUAL_RATES = "an effective learning rate is one number, and parameter groups have several learning rates"
NO_GRADIENT = "the full gradient is zero: it underflowed in low precision (pass scaler=), or there is nothing to learn"

PENDING = 20  # records that stay on the device until they are read; older ones have been computed


@dataclass
class Measured:
    """The tensors of one record, on their device until the record is read."""

    step: int
    num_learners: int
    kept: int  # most steps that the noise scale averages
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
    reason: str = ""  # why the step is invalid, if this is already known
    marks: tuple[Mark, ...] = ()

    def record(self, series: Series, full_loss_of: str) -> NoiseRecord:
        """Convert it to numbers, after waiting for the step, and add its steps to the series."""
        last, begin, end = self.marks
        seconds, passed = seconds_between(begin, end), seconds_between(last, end)
        skipped, num_new = self.num_skipped, 0
        if self.own_TS is not None and self.mean_TS is not None and not self.reason:
            own_TS, mean_TS = _on_host(self.own_TS).numpy(), _on_host(self.mean_TS).numpy()
            left_out = series.add(own_TS, mean_TS, self.num_learners, self.at_mean, self.kept)
            skipped, num_new = skipped + left_out, len(own_TS) - left_out
        dynamics = self._dynamics(full_loss_of)
        reason = self.reason or (TWO_BATCHES if self.num_learners < 2 else NO_STEP if num_new == 0 else "")
        if not reason and self.products is not None:
            reason = self._reason_of(dynamics)
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
            dynamics=dynamics,
            spread=self._spread(),
            seconds=seconds,
            share=seconds / passed if passed > 0 else 0.0,
        )

    def _dynamics(self, full_loss_of: str) -> Dynamics | None:
        if self.products is None:
            return None
        hessian = None if self.hessian is None else float(_on_host(self.hessian))
        loss = float("nan") if self.full_loss is None else float(_on_host(self.full_loss))
        return dynamics_of(_on_host(self.products), self.lr, loss, hessian, self.num_learners, full_loss_of)

    def _reason_of(self, dynamics: Dynamics | None) -> str:
        assert self.products is not None
        if not bool(_on_host(self.products).isfinite().all()):
            return NOT_FINITE
        if math.isnan(self.lr):
            return UNEQUAL_RATES
        return "" if dynamics is not None and math.isfinite(dynamics.effective_lr) else NO_GRADIENT

    def _spread(self) -> Spread | None:
        if self.distance is None:
            return None
        square = float(_on_host(self.distance))
        values = () if self.eigenvalues is None else tuple(_on_host(self.eigenvalues).clamp_min(0.0).tolist())
        return Spread(consensus_distance=square**0.5, trace=square / self.num_learners, eigenvalues=values)


class RecordBuffer:
    """Keeps measured steps on the device, and converts them to records when they are read.

    Args:
        device: of the measured tensors.
        series: collects the sums of the steps.
        full_loss_of: description of the samples of the full gradient, for the records.
    """

    def __init__(self, device: torch.device, series: Series, full_loss_of: str) -> None:
        self.series, self._full_loss_of, self._device = series, full_loss_of, device
        self._records: list[NoiseRecord] = []
        self._pending: list[Measured] = []
        self._last = mark_on(device)

    @property
    def records(self) -> list[NoiseRecord]:
        """All records so far. Waits for the device."""
        return self._convert(0)

    def begin(self) -> Mark:
        """The mark at which measuring a step begins."""
        return mark_on(self._device)

    def end(self, result: Measured, begin: Mark) -> None:
        """Store a measured step."""
        end = mark_on(self._device)
        result.marks = (self._last, begin, end)
        self._last = end
        self._pending.append(result)
        self._convert(PENDING)

    def clear(self) -> None:
        """Discard all records; time counts from now."""
        self._records, self._pending = [], []
        self._last = mark_on(self._device)

    def _convert(self, pending: int) -> list[NoiseRecord]:
        while len(self._pending) > pending:
            self._records.append(self._pending.pop(0).record(self.series, self._full_loss_of))
        return self._records


def _on_host(tensor: Tensor) -> Tensor:
    """A copy on the CPU of a tensor that is complete, without waiting for later work of the current stream."""
    if not tensor.is_cuda:
        return tensor
    with torch.cuda.stream(_side_stream(tensor.device)):
        return tensor.cpu()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
