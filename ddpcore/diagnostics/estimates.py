r"""Gradient noise scale, AdaScale gain and Pollux efficiency from sums of squares, with confidence intervals.

n learners draw b samples each; G is the full gradient, S the covariance of one sample's. With ``s = 1/n sum_j |g_j|^2``
and ``l = |1/n sum_j g_j|^2`` of a step (McCandlish et al. 2018, appendix A.1, with B_small = b and B_big = n b):

    |G|^2 = (n l - s) / (n - 1),    tr S = b n (s - l) / (n - 1),    noise scale B = tr S / |G|^2

are unbiased, numerator and denominator. Both are averaged over steps first and divided last: their ratio in one step
has no mean. With B come the gain of AdaScale, ``r = n (B + b) / (B + n b)`` (Johnson et al. 2020, section 3), by which
a step with n learners is worth more than one with one, and Pollux's statistical efficiency r / n (Qiao et al. 2021,
equation 7).

Batches of an epoch's permutation share no sample, which sets them a little apart: the mean of two batches' inner
product is ``|G|^2 - tr S / N``, N the samples of the set and S their covariance with divisor N - 1. So ``tr S / N`` is
added where N is given; without it B would come out as ``B / (1 - B / N)``. Of noise that a sample draws anew each time
(augmentation, dropout) no part belongs there: with variance W of it in tr S, ``W / N`` is added too much.

Shapes: T steps, S segments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Array = NDArray[np.float64]
Interval = tuple[float, float]

NUM_BATCHES = 10  # of steps, whose means stand for independent ones
FEWEST_BATCHES = 3  # below, there is no interval


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """What the gradients of some steps say of one part of the model, or of all of it.

    Attributes:
        grad_squared: estimate of ``|G|^2``; below zero where noise is all there is.
        trace: estimate of ``tr S``, of one sample's gradient (or one batch's, where the batch size was left at 1).
        noise_scale: B, in samples; infinite where ``grad_squared`` is not above zero.
        interval: 95 % confidence interval of B (Fieller 1954, on means of batches of steps); its upper end is infinite
            where ``|G|^2`` may be zero. None with fewer than FEWEST_BATCHES steps.
        gain: r, from 1 to n.
        efficiency: r / n.
    """

    grad_squared: float
    trace: float
    noise_scale: float
    interval: Interval | None
    gain: float
    efficiency: float

    def gain_interval(self, num_learners: int, batch_size: int) -> Interval | None:
        """The interval of the gain: it grows with B."""
        if self.interval is None:
            return None
        low, high = (gain_of(scale, num_learners, batch_size) for scale in self.interval)
        return low, high


def gain_of(noise_scale: float, num_learners: int, batch_size: int) -> float:
    """r = n (B + b) / (B + n b); n where B is infinite."""
    if math.isinf(noise_scale):
        return float(num_learners)
    return num_learners * (noise_scale + batch_size) / (noise_scale + num_learners * batch_size)


def noise_scale(
    own_T: Array, mean_T: Array, *, num_learners: int, batch_size: int, population: int | None = None
) -> NoiseScale:
    """The estimate from T steps.

    Args:
        own_T: s of each step: mean over learners of the squared norm of a gradient.
        mean_T: l of each step: squared norm of the mean gradient.
        num_learners: n.
        batch_size: b.
        population: N, samples that the batches are drawn from without replacement, as from an epoch's permutation.

    Raises:
        ValueError: fewer than two learners, no steps, or numbers that are not finite.
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


def ratio_interval(numerator_T: Array, denominator_T: Array, level: float = 0.95) -> Interval | None:
    """Fieller's interval of E(numerator) / E(denominator), both of one sign or zero, from batch means.

    The ratio R of the means satisfies ``(x - R y)^2 <= t^2 var(x - R y)`` with the given probability, whatever R is. So
    the interval is where this quadratic in R holds. Where y may be zero it has no upper end.
    """
    num_batches = min(NUM_BATCHES, len(numerator_T))
    if num_batches < FEWEST_BATCHES:
        return None
    means_2B = [[part.mean() for part in np.array_split(x_T, num_batches)] for x_T in (numerator_T, denominator_T)]
    x, y = numerator_T.mean(), denominator_T.mean()
    (var_x, cov), (_, var_y) = np.cov(means_2B) / num_batches
    t2 = float(stdtrit(num_batches - 1, (1 + level) / 2)) ** 2
    a, b, c = y * y - t2 * var_y, x * y - t2 * cov, x * x - t2 * var_x  # a R^2 - 2 b R + c <= 0
    root = math.sqrt(max(b * b - a * c, 0.0))
    if a > 0 and y > 0:
        return max(0.0, (b - root) / a), max(0.0, (b + root) / a)
    if a < 0 < c:  # y may be zero, x may not: all from the positive root on
        return (b - root) / a, math.inf
    return 0.0, math.inf
