"""The estimates against problems whose noise is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ddpcore.diagnostics import noise_scale
from ddpcore.diagnostics.record import gain_of, ratio_interval


def isotropic(scale: float, num_learners: int, batch_size: int, num_steps: int, seed: int, d: int = 64):
    """s and l of steps of ``g_j = G + noise`` with |G|^2 = 1 and tr S = scale, spread evenly over d directions."""
    random = np.random.default_rng(seed)
    full = np.zeros(d)
    full[0] = 1.0
    std = math.sqrt(scale / d / batch_size)
    gradients = full + std * random.standard_normal((num_steps, num_learners, d))
    return np.square(gradients).sum(axis=2).mean(axis=1), np.square(gradients.mean(axis=1)).sum(axis=1)


@pytest.mark.parametrize(
    ("scale", "num_learners", "num_steps"), [(1000.0, 2, 50), (1000.0, 8, 50), (100.0, 4, 30), (1e5, 4, 50)]
)
def test_intervals_hold_the_true_noise_scale(scale, num_learners, num_steps):
    """In 95 % of runs; of 200, 180 or fewer would happen to a true interval in less than one case of a hundred."""
    inside = 0
    for seed in range(200):
        own_T, mean_T = isotropic(scale, num_learners, 32, num_steps, seed)
        estimate = noise_scale(own_T, mean_T, num_learners=num_learners, batch_size=32)
        low, high = estimate.interval
        inside += low <= scale <= high
    assert inside >= 180


def test_intervals_are_no_wider_than_they_need_be():
    """With much data the interval closes in on the truth, so that it says something."""
    own_T, mean_T = isotropic(1000.0, 8, 128, 5000, 1)
    low, high = noise_scale(own_T, mean_T, num_learners=8, batch_size=128).interval
    assert 0.85 * 1000 < low < high < 1.15 * 1000


def test_unbiased_parts():
    """|G|^2 and tr S have the right means, each within five of its standard errors."""
    own_T, mean_T = isotropic(500.0, 3, 16, 20_000, 2)
    each = [noise_scale(own_T[i : i + 1], mean_T[i : i + 1], num_learners=3, batch_size=16) for i in range(20_000)]
    for values, truth in (([one.grad_squared for one in each], 1.0), ([one.trace for one in each], 500.0)):
        error = np.std(values) / math.sqrt(len(values))
        assert abs(np.mean(values) - truth) < 5 * error
    assert any(one.grad_squared < 0 for one in each), "in one step the estimate may be negative"


def test_closed_form_of_two_gradients():
    """g = (3, 1), (1, 1): s = 6, l = 5, so |G|^2 = g_1 . g_2 = 4 and tr S = b |g_1 - g_2|^2 / 2 = 2 b."""
    estimate = noise_scale(np.array([6.0]), np.array([5.0]), num_learners=2, batch_size=7)
    assert estimate.grad_squared == pytest.approx(4.0, rel=1e-15)
    assert estimate.trace == pytest.approx(14.0, rel=1e-15)
    assert estimate.noise_scale == pytest.approx(3.5, rel=1e-15)
    assert estimate.gain == pytest.approx(2 * (3.5 + 7) / (3.5 + 14), rel=1e-15)
    assert estimate.efficiency == estimate.gain / 2
    assert estimate.interval is None


def test_gain_goes_from_one_to_the_number_of_learners():
    gains = [gain_of(scale, 8, 32) for scale in (0.0, 10.0, 1e3, 1e9, math.inf)]
    assert gains[0] == 1.0 and gains[-1] == 8.0 and gains == sorted(gains) and gains[3] == pytest.approx(8, rel=1e-5)
    # AdaScale's own words: (variance + squared norm) / (variance / n + squared norm), variance tr S / b
    assert gains[2] == pytest.approx((1e3 / 32 + 1) / (1e3 / 32 / 8 + 1), rel=1e-14)


def test_noise_alone_has_no_upper_end():
    random = np.random.default_rng(0)
    gradients = random.standard_normal((40, 4, 10))
    own_T, mean_T = np.square(gradients).sum(2).mean(1), np.square(gradients.mean(1)).sum(1)
    estimate = noise_scale(own_T, mean_T, num_learners=4, batch_size=1)
    assert estimate.interval[1] == math.inf
    low, high = (gain_of(scale, 4, 1) for scale in estimate.interval)
    assert 1.0 <= low < high == 4.0


def test_fieller_against_its_definition():
    """The ends are where ``(x - R y)^2 = t^2 var(x - R y)``."""
    random = np.random.default_rng(3)
    x, y = 5 + random.standard_normal(10), 2 + 0.3 * random.standard_normal(10)
    for end in ratio_interval(x, y):
        z = x - end * y
        assert abs(z.mean()) / (z.std(ddof=1) / math.sqrt(10)) == pytest.approx(2.2621571628540993, rel=1e-9)


@pytest.mark.parametrize(
    ("own", "mean", "num_learners", "message"),
    [
        ([1.0], [1.0], 1, "the estimate needs two batches"),
        ([], [], 2, "at least one step"),
        ([math.nan], [1.0], 2, "finite sums"),
    ],
)
def test_bad_input(own, mean, num_learners, message):
    with pytest.raises(ValueError, match=message):
        noise_scale(np.array(own), np.array(mean), num_learners=num_learners, batch_size=1)


def test_batches_without_replacement():
    """All ordered pairs of samples of a small set: what each estimate averages to is the truth, to rounding."""
    rows = np.random.default_rng(0).standard_normal((6, 3)) + 0.4
    pairs = [(rows[i], rows[j]) for i in range(6) for j in range(6) if i != j]
    own = np.array([(a @ a + b @ b) / 2 for a, b in pairs])
    mean = np.array([(a + b) @ (a + b) / 4 for a, b in pairs])
    scale = noise_scale(own, mean, num_learners=2, batch_size=1, population=6)
    center = rows.mean(axis=0)
    assert scale.grad_squared == pytest.approx(center @ center, rel=1e-12)
    assert scale.trace == pytest.approx(np.square(rows - center).sum() / 5, rel=1e-12)
    assert noise_scale(own, mean, num_learners=2, batch_size=1).grad_squared < 0.9 * center @ center


def test_the_interval_is_one_of_batch_means():
    """Steps that repeat each other are no further evidence: four times each of ten, and the ten."""
    rng = np.random.default_rng(1)
    own, mean = 5 + 0.2 * rng.random(10), 4 + 0.2 * rng.random(10)
    once = noise_scale(own, mean, num_learners=2, batch_size=8)
    often = noise_scale(own.repeat(4), mean.repeat(4), num_learners=2, batch_size=8)
    assert once.interval is not None and 0 < once.interval[0] < once.interval[1] < math.inf
    assert often.interval == pytest.approx(once.interval, rel=1e-12)
