"""The generator of csrc/random.h and its reference: published vectors, and whether its numbers are independent normals.

``test_mix_noise.py`` shows that the reference has the bits of the kernels; large samples are drawn by the kernels.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.ops.random import normals, philox

NUM_DRAWS = 1_000_000
STREAMS = [(0, 0), (1, 0), (0, 1), (2**63 - 1, 2**63 - 1), (20_200_101, 123_456)]  # seed, step
# The generator and these tests are deterministic. A correct generator fails a check with probability
# 6e-7, that of 5 standard deviations.
DEVIATIONS = 5.0


def sample_of(seed: int, step: int, first: int = 0) -> Tensor:
    """The numbers that ``mix_`` adds to weights of zero, in float64."""
    weights = torch.zeros(NUM_DRAWS)
    ops.mix_(weights, [], 1.0, [], ops.Noise(1.0, seed, step, first))
    return weights.double()


def probability_beyond(deviations: float) -> float:
    return math.erfc(deviations / math.sqrt(2))


@pytest.mark.parametrize(
    ("counter", "key", "drawn"),
    [
        ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_words(counter, key, drawn):
    """The published vectors of Random123 for philox4x32-10, Salmon et al. 2011."""
    words = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert [int(word) for word in words] == drawn


@pytest.mark.parametrize(("seed", "step"), STREAMS)
def test_moments_and_distribution(seed, step):
    sample = sample_of(seed, step, first=17)
    # Variances of the estimates for standard normals: of x, x^2, x^3 and x^4 they are 1, 2, 15 and 96.
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((sample**power).mean() - mean) < DEVIATIONS * math.sqrt(variance / NUM_DRAWS), f"moment {power}"
    expected = NUM_DRAWS * probability_beyond(4)
    assert abs(int((sample.abs() > 4).sum()) - expected) < DEVIATIONS * math.sqrt(expected)


@pytest.mark.parametrize(("seed", "step"), STREAMS)
def test_kolmogorov_and_smirnov(seed, step):
    """``sqrt(n)`` times the distance of the distribution functions exceeds x in ``2*exp(-2*x*x)`` of samples."""
    normal = torch.special.ndtr(sample_of(seed, step).sort().values)
    below = torch.arange(NUM_DRAWS, dtype=torch.float64) / NUM_DRAWS
    distance = max(float((normal - below).max()), float((below + 1 / NUM_DRAWS - normal).max()))
    assert 2 * math.exp(-2 * NUM_DRAWS * distance**2) > 1e-6


def test_the_tails_are_there():
    """Of 6e7 numbers, about 34 exceed 5 standard deviations and 2.3 exceed 5.5."""
    sizes = torch.cat([sample_of(3, step).abs().topk(20).values for step in range(60)])
    expected = 60 * NUM_DRAWS * probability_beyond(5)
    assert abs(int((sizes > 5).sum()) - expected) < DEVIATIONS * math.sqrt(expected)
    assert sizes.max() > 5.5


def correlation(left: Tensor, right: Tensor) -> float:
    """Errors in standard deviations of the estimate."""
    return float((left * right).mean() * math.sqrt(len(left)))


def test_neighbours_are_not_correlated():
    one = sample_of(5, 9)
    for shift in (1, 2, 3, 4, 5, 8, 16, 64, 4096):
        assert abs(correlation(one[:-shift], one[shift:])) < DEVIATIONS, f"indices {shift} apart"
        squares = correlation(one[:-shift] ** 2 - 1, one[shift:] ** 2 - 1) / 2
        assert abs(squares) < DEVIATIONS, f"squares of indices {shift} apart"
    for seed, step in ((5, 10), (5, 8), (6, 9), (4, 9), (9, 5), (5 + 2**32, 9), (5, 9 + 2**32)):
        other = sample_of(seed, step)
        assert abs(correlation(one, other)) < DEVIATIONS, f"seed {seed}, step {step}"
        assert abs(correlation(one**2 - 1, other**2 - 1) / 2) < DEVIATIONS, f"squares of seed {seed}, step {step}"


@pytest.mark.parametrize("first", [0, 1, 2, 3, 64, 2**34 - 7, 2**62 + 1])
def test_a_part_has_the_numbers_of_the_whole(first, assert_same_bits):
    whole = normals(1000, 7, 11, first)
    assert whole.dtype == torch.float32 and whole.shape == (1000,)
    for begin, end in ((0, 0), (0, 1), (1, 1000), (2, 7), (3, 4), (500, 999)):
        assert_same_bits(normals(end - begin, 7, 11, first + begin), whole[begin:end], f"{begin} to {end}")
