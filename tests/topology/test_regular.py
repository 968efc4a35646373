"""Topologies of one formula: their matrices as documented, gaps in closed form, numbers that do not fit."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest

from ddpcore import Hierarchical, Hypercube, Ring, Round, Star, StaticExponential, Topology, Torus2D
from ddpcore.topology import rounds
from helpers.each import each


def dense_gap(chosen: Topology, num_learners: int) -> float:
    """1 - sigma_2 of one step, from all singular values."""
    return float(1 - np.linalg.svd(chosen.matrix(0, num_learners), compute_uv=False)[1])


def test_star_is_the_documented_matrix() -> None:
    n = 5
    expected = np.eye(n) * (1 - 1 / n)
    expected[0], expected[:, 0] = 1 / n, 1 / n
    np.testing.assert_allclose(Star().matrix(3, n), expected, atol=1e-15)
    assert Star().round(0, 0, 3) == Round(1 / 3, (1, 2), (1 / 3, 1 / 3), (1, 2))
    assert Star().round(0, 2, 3) == Round(2 / 3, (0,), (1 / 3,), (0,))
    for n in (3, 5, 8):
        assert Star().spectral_gap(n) == pytest.approx(1 / n, abs=1e-12)


@pytest.mark.parametrize(("n", "shape"), [(4, (2, 2)), (6, (2, 3)), (12, (3, 4)), (36, (6, 6)), (14, (2, 7))])
def test_torus_is_two_rings_at_right_angles(n: int, shape: tuple[int, int]) -> None:
    assert Torus2D().translations(n) == shape
    sides = [{(1,), (length - 1,)} for length in shape]
    neighbors = [(hop[0], 0) for hop in sides[0]] + [(0, hop[0]) for hop in sides[1]]
    expected = np.zeros((n, n))
    for row in range(shape[0]):
        for column in range(shape[1]):
            for down, right in [(0, 0), *neighbors]:
                other = (row + down) % shape[0] * shape[1] + (column + right) % shape[1]
                expected[row * shape[1] + column, other] = 1 / (len(neighbors) + 1)
    np.testing.assert_allclose(Torus2D().matrix(0, n), expected, atol=1e-15)


def test_torus_of_so_many_rows() -> None:
    assert Torus2D(2).translations(12) == (2, 6)
    assert Torus2D(6).translations(12) == (6, 2)
    assert Torus2D().round(0, 0, 1) == Round(1.0, (), (), ())


@pytest.mark.parametrize("n", [2, 4, 16, 64])
def test_hypercube(n: int) -> None:
    bits = int(math.log2(n))
    hamming = np.array([[(j ^ k).bit_count() for k in range(n)] for j in range(n)])
    np.testing.assert_allclose(Hypercube().matrix(0, n), (hamming <= 1) / (bits + 1), atol=1e-15)
    # eigenvalues (T + 1 - 2k) / (T + 1), k = 0 ... T: the second is 1 - 2 / (T + 1), the last its negative
    expected = min(2 / (bits + 1), 1.0)
    assert Hypercube().spectral_gap(n) == pytest.approx(expected, abs=1e-12)


@each("n", [*range(2, 20), 100, 101])
def test_static_exponential(n: int) -> None:
    """Equation 5 of Ying et al. 2021, and their theorem 1 on its gap."""
    powers = (n - 1).bit_length()
    behind = np.subtract.outer(np.arange(n), np.arange(n)) % n
    is_power = (behind > 0) & (behind & (behind - 1) == 0)
    np.testing.assert_allclose(StaticExponential().matrix(0, n), (is_power | (behind == 0)) / (powers + 1), atol=1e-15)
    gap = StaticExponential().spectral_gap(n)
    if n % 2 == 0:
        assert gap == pytest.approx(2 / (powers + 1), abs=1e-12)
    else:
        assert gap > 2 / (powers + 1)


@each("n", [1, 2, 4, 9, 12, 16, 36])
@pytest.mark.parametrize("chosen", [Star(), Torus2D(), Torus2D(3), Hypercube(), StaticExponential()], ids=repr)
def test_the_gap_is_that_of_the_matrix(chosen: Topology, n: int) -> None:
    try:
        chosen.validate(n)
    except ValueError:
        return
    gap = chosen.spectral_gap(n)
    assert gap == (1.0 if n == 1 else pytest.approx(dense_gap(chosen, n), abs=1e-12))
    shape = chosen.translations(n)
    if shape is not None:
        assert math.prod(shape) == n
        mixing = chosen.mixing_matrix(0, n)
        assert gap == pytest.approx(1 - rounds.contraction([mixing]) if n > 1 else 1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("chosen", "n", "message"),
    [
        (Hypercube(), 6, "6 learners are no power of two: take 8, or StaticExponential"),
        (Hypercube(), 243, "take 256"),
        (Torus2D(), 7, "7 learners are no grid of rows and columns, at least 2 of each: .* or Ring"),
        (Torus2D(), 2, "2 learners are no grid"),
        (Torus2D(5), 12, "12 learners are no grid of 5 rows"),
        (Torus2D(1), 12, "12 learners are no grid of 1 rows"),
        (Torus2D(12), 12, "12 learners are no grid of 12 rows"),
    ],
)
def test_numbers_that_do_not_fit(chosen: Topology, n: int, message: str) -> None:
    questions: list[Any] = [chosen.validate, chosen.spectral_gap, lambda n: chosen.round(0, 0, n)]
    for question in questions:
        with pytest.raises(ValueError, match=message) as caught:
            question(n)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("chosen", "fitting"),
    [
        (Hypercube(), [1, 2, 4, 8, 16]),
        (Torus2D(), [1, 4, 6, 8, 9, 10, 12, 14, 15, 16, 18, 20, 21, 22, 24]),
        (Torus2D(3), [6, 9, 12, 15, 18, 21, 24]),
        (Ring(2), list(range(5, 25))),
        (Hierarchical(4), [4, 8, 12, 16, 20, 24]),
        (Hierarchical(2, Hypercube()), [2, 4, 8, 16]),
        (Star(), list(range(1, 25))),
        (StaticExponential(), list(range(1, 25))),
    ],
    ids=repr,
)
def test_the_numbers_that_fit(chosen: Topology, fitting: list[int]) -> None:
    found = []
    for n in range(1, 25):
        with contextlib.suppress(ValueError):
            chosen.validate(n)
            found.append(n)
    assert found == fitting
    assert chosen.spectral_gap(found[-1]) > 0


def test_impossible_rows() -> None:
    with pytest.raises(ValueError, match="num_rows is -1"):
        Torus2D(-1)
