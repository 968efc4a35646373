"""Rounds of pairs that are given, and hosts of several learners."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest

from ddpcore import (
    Complete,
    FromMatrix,
    Hierarchical,
    Hypercube,
    Matching,
    OnePeerExponential,
    RandomPair,
    Ring,
    Round,
    Topology,
)


def test_rounds_take_turns() -> None:
    chosen = Matching([[(0, 1), (2, 3)], [(3, 0)], []])
    assert chosen.period(4) == 3
    for step in (0, 3, 6):
        assert chosen.round(step, 3, 4) == Round(0.5, (2,), (0.5,), (2,))
    assert chosen.round(1, 0, 4) == Round(0.5, (3,), (0.5,), (3,))
    assert chosen.round(1, 1, 4) == chosen.round(2, 0, 4) == Round(1.0, (), (), ())
    chosen = Matching([[(0, 1), (2, 3)], [(1, 2)]])
    chosen.validate(4)
    assert chosen == Matching(pairs for pairs in [((0, 1), (2, 3)), [(1, 2)]]) == pickle.loads(pickle.dumps(chosen))
    assert hash(chosen) == hash(Matching([[(0, 1), (2, 3)], [(1, 2)]]))


def test_the_rounds_of_a_hypercube_are_the_exact_mean() -> None:
    chosen = Matching([[(j, j ^ 1 << bit) for j in range(8) if j < j ^ 1 << bit] for bit in range(3)])
    chosen.validate(8)
    assert chosen.spectral_gap(8) == 1.0
    product = chosen.matrix(2, 8) @ chosen.matrix(1, 8) @ chosen.matrix(0, 8)
    np.testing.assert_array_equal(product, np.full((8, 8), 1 / 8))


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        ([], "there are no rounds"),
        ([[(0, 1)], [(0, 1), (1, 2)]], "learner 1 is twice in round 1, it can have one partner: move a pair"),
        ([[(0, 0)]], "learner 0 is twice in round 0"),
        ([[(0, -1)]], "round 0 names learner -1"),
    ],
)
def test_rounds_that_are_no_matchings(rounds: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Matching(rounds)


def test_matchings_and_numbers_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="names learner 5 and there are 5"):
        Matching([[(0, 1)], [(4, 5)]]).round(0, 0, 5)
    with pytest.raises(ValueError, match="of 4 learners is not connected"):
        Matching([[(0, 1)], [(2, 3)]]).validate(4)
    with pytest.raises(ValueError, match="of 5 learners is not connected"):
        Matching([[(0, 1), (2, 3)], [(1, 2)]]).validate(5)


# --- hosts -------------------------------------------------------------------------------------------------------


def hosts_matrix(between: Topology, step: int, num_hosts: int, size: int) -> np.ndarray:
    """The documented Kronecker products."""
    inner = between.matrix(step, num_hosts)
    own = np.diag(np.diag(inner))
    return np.kron(own, np.full((size, size), 1 / size)) + np.kron(inner - own, np.eye(size))


IRREGULAR = FromMatrix(0.5 * np.eye(3)[[1, 0, 2]] + 0.25 * np.eye(3)[[1, 2, 0]] + 0.25 * np.eye(3))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("between", [Complete(), Ring(), OnePeerExponential(), RandomPair(3), IRREGULAR], ids=repr)
def test_hierarchical_is_the_documented_matrix(between: Topology, size: int) -> None:
    chosen, n = Hierarchical(size, between), 3 * size
    chosen.validate(n)
    for step in range(4):
        np.testing.assert_allclose(chosen.matrix(step, n), hosts_matrix(between, step, 3, size), atol=1e-15)
    assert chosen.period(n) == between.period(3)
    if between.period(3) is not None:
        product = np.eye(n)
        for step in range(between.period(3) or 0):
            product = hosts_matrix(between, step, 3, size) @ product
        sigma = np.linalg.svd(product, compute_uv=False)[1]
        expected = 1 - sigma ** (1 / (between.period(3) or 1))
        assert chosen.spectral_gap(n) == pytest.approx(expected, abs=1e-9)


def test_a_host_that_gives_itself_nothing_reads_nothing_inside() -> None:
    swap = FromMatrix([[0.0, 1.0], [1.0, 0.0]])
    assert Hierarchical(2, swap).round(0, 1, 4) == Round(0.0, (3,), (1.0,), (3,))


@pytest.mark.parametrize("num_hosts", [2, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_gap_of_random_pairs_of_hosts(size: int, num_hosts: int) -> None:
    """E[W^T W] over all matchings of the hosts, each of them once."""
    squares = {}
    for order in itertools.permutations(range(num_hosts)):
        inner = np.eye(num_hosts)
        for left, right in zip(order[0:-1:2], order[1::2], strict=False):
            inner[np.ix_([left, right], [left, right])] = 0.5
        own = np.diag(np.diag(inner))
        mixing = np.kron(own, np.full((size, size), 1 / size)) + np.kron(inner - own, np.eye(size))
        squares[inner.tobytes()] = mixing.T @ mixing
    n = num_hosts * size
    deviation = sum(squares.values()) / len(squares) - 1 / n
    expected = 1 - np.linalg.eigvalsh(deviation)[-1]
    assert Hierarchical(size, RandomPair()).spectral_gap(n) == pytest.approx(expected, abs=1e-12)


def test_one_host_and_one_learner() -> None:
    for between in (OnePeerExponential(), RandomPair()):
        np.testing.assert_allclose(Hierarchical(4, between).matrix(0, 4), np.full((4, 4), 1 / 4))
        assert Hierarchical(4, between).spectral_gap(4) == 1.0
        assert Hierarchical(1, between).spectral_gap(1) == 1.0


def test_hosts_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="10 learners are no multiple of local_size 4"):
        Hierarchical(4).validate(10)
    with pytest.raises(ValueError, match="local_size is 0"):
        Hierarchical(0)
    with pytest.raises(ValueError, match="Hypercube: 3 learners"):
        Hierarchical(2, Hypercube()).validate(6)
