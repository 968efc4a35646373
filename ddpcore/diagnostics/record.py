"""Records of noise statistics: noise scale, AdaScale gain and Pollux efficiency of the last steps, with intervals.

n learners draw b samples each. G is the full gradient and S the covariance of the gradient of one sample. A step has
``s = 1/n sum_j |g_j|^2`` and ``l = |1/n sum_j g_j|^2``. McCandlish et al. 2018, appendix A.1, with B_small = b and
B_big = n b:

    |G|^2 = (n l - s) / (n - 1),    tr S = b n (s - l) / (n - 1),    noise scale B = tr S / |G|^2

Both estimates are averaged over steps before the division, because the ratio of one step has no expectation. B gives
the gain of AdaScale, ``r = n (B + b) / (B + n b)`` (Johnson et al. 2020, section 3), and Pollux's statistical
efficiency r / n (Qiao et al. 2021, equation 7).

The expected inner product of two batches from one permutation of N samples is ``|G|^2 - tr S / N``, with the divisor
N - 1 of S. So ``tr S / N`` is added if N is given; docs/noise_statistics.md says when this is too much.

Shapes: T steps, S segments.
"""

import functools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpcore.diagnostics.dynamics import Dynamics, Spread, dynamics_of
from ddpcore.options.extras import extra

MEASURED = 20  # steps that are averaged if only measured steps have sums
PENDING = 20  # records that stay on the device until they are read; older ones have been computed
TWO_BATCHES = "the estimate needs two batches: take more learners, or accumulate gradients over several passes"
NO_STEP = (
    "no step since the last record had finite gradients of one full batch a learner; to accumulate, "
    "a handle takes all passes of a step but the last in handle.no_sync()"
)
NOT_FINITE = "a gradient of this step is not finite"
UNEQUAL_RATES = "an effective learning rate is one number, and parameter groups have several learning rates"
NO_GRADIENT = "the full gradient is zero: it underflowed in low precision (pass scaler=), or there is nothing to learn"

Mark = Any  # a torch.cuda.Event, or seconds


@dataclass(frozen=True, kw_only=True)
class NoiseRecord:
    """The statistics at one step."""

    step: int  #: number of optimizer steps, including this one
    valid: bool  #: whether the numbers are meaningful
    reason: str  #: why they are not; empty if ``valid``
    num_learners: int  #: n; on one device the number of backward passes of a step
    batch_size: int  #: b, as given
    num_steps: int  #: steps that the noise scale averages
    num_skipped: int  #: steps left out since the last record: before a death, not finite, or not of one full batch
    at_mean: bool  #: whether the gradients were computed at the mean weights; otherwise at each learner's own weights
    whole: "NoiseScale | None"  #: noise scale of all parameters
    segments: "dict[str, NoiseScale]"  #: noise scale of each parameter by name; empty with ``per_segment=False``
    dynamics: Dynamics | None  #: None without ``full_loss``
    spread: Spread | None  #: None if learners hold the same weights
    seconds: float  #: time of measuring in this step, without the work that every step does
    share: float  #: ``seconds`` divided by the time since the last record, from 0 to 1


class Series:
    """The sums of the last steps, by the names of the segments, and the noise scales that they give."""

    def __init__(
        self, batch_size: int, names: Sequence[str], per_segment: bool = True, population: int | None = None
    ) -> None:
        self.batch_size, self.names = batch_size, tuple(names)
        self._per_segment, self._population = per_segment, population
        self._own: list[Array] = []
        self._mean: list[Array] = []
        self._kind: tuple[int, bool] = (0, True)

    def add(self, own_TS: "Array", mean_TS: "Array", num_learners: int, at_mean: bool, kept: int) -> int:
        """Add steps and keep the last ``kept`` ones; returns the number of steps with sums that are not finite.

        If the number of learners or ``at_mean`` differs from earlier steps, those are discarded: they do not compare.
        """
        if (num_learners, at_mean) != self._kind:
            self._own, self._mean, self._kind = [], [], (num_learners, at_mean)
        finite_T = np.isfinite(own_TS).all(axis=1) & np.isfinite(mean_TS).all(axis=1)
        self._own = [*self._own, *own_TS[finite_T]][-kept:]
        self._mean = [*self._mean, *mean_TS[finite_T]][-kept:]
        return int((~finite_T).sum())

    def __len__(self) -> int:
        return len(self._own)

    def state_dict(self) -> dict[str, Any]:
        """The kept steps, as tensors."""
        own, mean = ([torch.from_numpy(row) for row in rows] for rows in (self._own, self._mean))
        return {"own": own, "mean": mean, "num_learners": self._kind[0], "at_mean": self._kind[1]}

    def load_state_dict(self, state: dict[str, Any], order: Sequence[int]) -> None:
        """Restore :meth:`state_dict`; ``order`` holds the saved index of each segment."""
        self._kind = state["num_learners"], state["at_mean"]
        self._own, self._mean = ([row.numpy()[list(order)] for row in state[name]] for name in ("own", "mean"))

    def scales(self) -> "tuple[NoiseScale | None, dict[str, NoiseScale]]":
        """The noise scale of all segments together, and of each; none before the first step, or with one learner."""
        if not self._own or self._kind[0] < 2:
            return None, {}
        own_TS, mean_TS = np.array(self._own), np.array(self._mean)
        given: Any = {"num_learners": self._kind[0], "batch_size": self.batch_size, "population": self._population}
        names = self.names if self._per_segment else ()
        segments = {name: noise_scale(own_TS[:, s], mean_TS[:, s], **given) for s, name in enumerate(names)}
        return noise_scale(own_TS.sum(axis=1), mean_TS.sum(axis=1), **given), segments


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
        dynamics, problem = self._dynamics(full_loss_of)
        reason = self.reason or (TWO_BATCHES if self.num_learners < 2 else NO_STEP if num_new == 0 else problem)
        whole, segments = series.scales()
        return NoiseRecord(
            step=self.step, valid=not reason, reason=reason, at_mean=self.at_mean,
            num_learners=self.num_learners, batch_size=series.batch_size, num_steps=len(series), num_skipped=skipped,
            whole=whole, segments=segments, dynamics=dynamics, spread=self._spread(),
            seconds=seconds, share=seconds / passed if passed > 0 else 0.0,
        )  # fmt: skip

    def _dynamics(self, full_loss_of: str) -> tuple[Dynamics | None, str]:
        """The dynamics, and why their numbers are not meaningful; empty if they are."""
        if self.products is None:
            return None, ""
        products = _on_host(self.products)
        hessian = None if self.hessian is None else float(_on_host(self.hessian))
        loss = float("nan") if self.full_loss is None else float(_on_host(self.full_loss))
        found = dynamics_of(products, self.lr, loss, hessian, self.num_learners, full_loss_of)
        if not bool(products.isfinite().all()):
            return found, NOT_FINITE
        if math.isnan(self.lr):
            return found, UNEQUAL_RATES
        return found, "" if math.isfinite(found.effective_lr) else NO_GRADIENT

    def _spread(self) -> Spread | None:
        if self.distance is None:
            return None
        square = float(_on_host(self.distance))
        values = () if self.eigenvalues is None else tuple(_on_host(self.eigenvalues).clamp_min(0.0).tolist())
        return Spread(consensus_distance=square**0.5, trace=square / self.num_learners, eigenvalues=values)


class RecordBuffer:
    """Keeps measured steps on the device, and converts them to records when they are read."""

    def __init__(self, device: torch.device, series: Series, full_loss_of: str) -> None:
        self.series, self._full_loss_of, self._device = series, full_loss_of, device
        self.clear()

    def clear(self) -> None:
        """Discard all records; time counts from now."""
        self._records: list[NoiseRecord] = []
        self._pending: list[Measured] = []
        self._last = mark_on(self._device)

    @property
    def records(self) -> list[NoiseRecord]:
        """All records so far. Waits for the device."""
        return self._convert(0)

    @contextmanager
    def measuring(self, result: Measured) -> Iterator[Measured]:
        """In the ``with`` block a step is measured; it is stored after it, unless the block raises."""
        begin = mark_on(self._device)
        yield result
        end = mark_on(self._device)
        result.marks = (self._last, begin, end)
        self._last = end
        self._pending.append(result)
        self._convert(PENDING)

    def _convert(self, pending: int) -> list[NoiseRecord]:
        while len(self._pending) > pending:
            self._records.append(self._pending.pop(0).record(self.series, self._full_loss_of))
        return self._records


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


def _on_host(tensor: Tensor) -> Tensor:
    """A copy on the CPU of a tensor that is complete, without waiting for later work of the current stream."""
    if not tensor.is_cuda:
        return tensor
    with torch.cuda.stream(_side_stream(tensor.device)):
        return tensor.cpu()


_side_stream = functools.cache(torch.cuda.Stream)


Array = NDArray[np.float64]
Interval = tuple[float, float]

NUM_BATCHES = 10  # of steps, whose means are treated as independent
FEWEST_BATCHES = 3  # with fewer steps there is no interval


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """The estimate for one segment of the model, or for the whole model."""

    grad_squared: float  #: estimate of ``|G|^2``; it can be negative if noise dominates
    trace: float  #: estimate of ``tr S``, for the gradient of one sample (of one batch if ``batch_size`` was left at 1)
    noise_scale: float  #: B, in samples; infinite if ``grad_squared`` is not above zero
    #: 95 % confidence interval of B (Fieller 1954, on means of batches of steps). Its upper end is infinite if
    #: ``|G|^2`` may be zero. None with fewer than FEWEST_BATCHES steps.
    interval: Interval | None
    gain: float  #: r, from 1 to n
    efficiency: float  #: r / n


def gain_of(noise_scale: float, num_learners: int, batch_size: int) -> float:
    """r = n (B + b) / (B + n b), in a form that also holds for an infinite B, where it is n."""
    return num_learners / (1 + (num_learners - 1) * batch_size / (noise_scale + batch_size))


def noise_scale(
    own_T: Array, mean_T: Array, *, num_learners: int, batch_size: int, population: int | None = None
) -> NoiseScale:
    """The estimate from T steps.

    Args:
        own_T: s of each step: mean over learners of the squared norm of a gradient.
        mean_T: l of each step: squared norm of the mean gradient.
        num_learners: n.
        batch_size: b.
        population: N, number of samples that batches are drawn from without replacement; None: no correction.

    ValueError: there are fewer than two learners or no steps, or a number is not finite.
    """
    if num_learners < 2:
        raise ValueError("the estimate needs two batches: take more learners, or accumulate gradients")
    if len(own_T) == 0 or not (np.isfinite(own_T).all() and np.isfinite(mean_T).all()):
        raise ValueError("the estimate needs at least one step, and finite sums: leave other steps out")
    n = num_learners
    squared_T = (n * mean_T - own_T) / (n - 1)
    trace_T = batch_size * n * (own_T - mean_T) / (n - 1)
    if population is not None:
        squared_T = squared_T + trace_T / population
    squared, trace = float(squared_T.mean()), float(trace_T.mean())
    scale = trace / squared if squared > 0 else math.inf
    gain = gain_of(max(scale, 0.0), n, batch_size)
    return NoiseScale(
        grad_squared=squared,
        trace=trace,
        noise_scale=scale,
        interval=ratio_interval(trace_T, squared_T),
        gain=gain,
        efficiency=gain / n,
    )


def ratio_interval(numerator_T: Array, denominator_T: Array) -> Interval | None:
    """Fieller's 95 % interval of E(numerator) / E(denominator), which must not be negative, from batch means.

    The ratio R of the means x and y satisfies ``(x - R y)^2 <= t^2 var(x - R y)`` with probability 0.95. The
    interval contains all R for which this quadratic inequality holds. It has no upper end if y may be zero.
    """
    num_batches = min(NUM_BATCHES, len(numerator_T))
    if num_batches < FEWEST_BATCHES:
        return None
    means_2B = [[part.mean() for part in np.array_split(x_T, num_batches)] for x_T in (numerator_T, denominator_T)]
    x, y = numerator_T.mean(), denominator_T.mean()
    (var_x, cov), (_, var_y) = np.cov(means_2B) / num_batches
    with extra("train"):
        from scipy.special import stdtrit  # noqa: PLC0415  only intervals need scipy
    t2 = float(stdtrit(num_batches - 1, (1 + 0.95) / 2)) ** 2
    a, b, c = y * y - t2 * var_y, x * y - t2 * cov, x * x - t2 * var_x  # a R^2 - 2 b R + c <= 0
    root = math.sqrt(max(b * b - a * c, 0.0))
    if a > 0 and y > 0:
        return max(0.0, (b - root) / a), max(0.0, (b + root) / a)
    return (b - root) / a if a < 0 < c else 0.0, math.inf  # y may be zero, x may not: R is at least the positive root
