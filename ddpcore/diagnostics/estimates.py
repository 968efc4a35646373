r"""Gradient noise scale, AdaScale gain and Pollux efficiency from sums of squares, with confidence intervals.

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

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddpcore.options.extras import extra

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
    """r = n (B + b) / (B + n b); n if B is infinite."""
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
    if a < 0 < c:  # y may be zero, x may not: R is at least the positive root
        return (b - root) / a, math.inf
    return 0.0, math.inf
