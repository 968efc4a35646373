"""RandomPair with several partners a step: the mean of the learner and its partners, and the expected square."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddpcore import TOPOLOGIES, RandomPair, Topology, Weighted
from ddpcore.comm.agreement import describe
from ddpcore.topology.pairs import random_matching
from ddpcore.topology.rounds import mixing_matrix
from ddpcore.topology.wrapped import Hierarchical


def dense(topology: RandomPair, step: int, n: int) -> np.ndarray:
    return mixing_matrix([topology.round(step, rank, n) for rank in range(n)]).dense()


@pytest.mark.parametrize("n", [1, 2, 5, 8])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_w_is_the_mean_of_the_identity_and_the_matchings(k: int, n: int) -> None:
    topology = RandomPair(3, num_partners=k)
    topology.validate(n)
    for step in range(10):
        matchings = [np.eye(n)[list(random_matching(3, step, n, draw))] for draw in range(k)]
        np.testing.assert_allclose(dense(topology, step, n), (np.eye(n) + sum(matchings)) / (k + 1), atol=1e-15)


def test_matchings_of_a_step_are_independent_and_the_first_is_that_of_one_partner() -> None:
    """Of eight learners a second matching has the same partner in one of seven cases."""
    pairs = [[random_matching(0, step, 8, draw) for draw in (0, 1)] for step in range(1000)]
    same = np.mean([np.array(first) == np.array(second) for first, second in pairs])
    assert abs(same - 1 / 7) < 0.05
    assert random_matching(0, 5, 8, 0) == random_matching(0, 5, 8)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 6, 7])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_expected_square_and_the_gap(k: int, n: int) -> None:
    topology = RandomPair(1, num_partners=k)
    squares = [dense(topology, step, n).T @ dense(topology, step, n) for step in range(2000)]
    of_matching = np.ones((n, n)) / n if n % 2 else (np.ones((n, n)) - np.eye(n)) / (n - 1)
    expected = (k + 1) * np.eye(n) + 2 * k * of_matching + k * (k - 1) * of_matching @ of_matching
    expected /= (k + 1) ** 2
    np.testing.assert_allclose(np.mean(squares, axis=0), expected, atol=0.04)
    eigenvalues = np.linalg.eigvalsh(expected - np.ones((n, n)) / n)
    assert topology.spectral_gap(n) == pytest.approx(1 - eigenvalues[-1], abs=1e-12)
    np.testing.assert_allclose(expected.sum(axis=0), 1)


def test_large_numbers_of_learners_draw_further_orders() -> None:
    n, topology = 4098, RandomPair(num_partners=2)
    rounds = topology.rounds(0, n)
    for rank in (0, 7, n - 1):
        assert rounds[rank] == topology.round(0, rank, n)
        assert len(rounds[rank].sources) == 2


def test_by_name_as_text_and_inside_hosts() -> None:
    two = TOPOLOGIES.build("random_pair", seed=4, num_partners=2)
    assert two == RandomPair(4, 2) and repr(two) == "RandomPair(seed=4, num_partners=2)"
    assert describe(RandomPair(4)) == "RandomPair(seed=4, num_partners=1)"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_partners": 0}, "num_partners is 0: it must be at least 1 and at most 65536"),
        ({"num_partners": 10**9}, "num_partners is 1000000000: it must be at least 1 and at most 65536"),
        ({"num_partners": 1.5}, "num_partners is 1.5: it must be a whole number"),
        ({"num_partners": True}, "num_partners is True: it must be a whole number"),
        ({"seed": "1"}, "seed is '1': it must be a whole number"),
        ({"seed": -1}, "seed is -1: it must be at least 0"),
    ],
)
def test_refusals(options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"^RandomPair: {says}$"):
        RandomPair(**options)


@pytest.mark.parametrize("num_hosts", [3, 4])
def test_between_hosts(num_hosts: int) -> None:
    """A mean over 2000 steps; the gap is that of the largest factor of a squared deviation."""
    hosts, n = Hierarchical(2, RandomPair(num_partners=2)), 2 * num_hosts
    rounds = [[hosts.round(step, rank, n) for rank in range(n)] for step in range(2000)]
    squares = [matrix.T @ matrix for matrix in (mixing_matrix(one).dense() for one in rounds)]
    shrunk = np.linalg.eigvalsh(np.mean(squares, axis=0) - np.ones((n, n)) / n)[-1]
    assert hosts.spectral_gap(n) == pytest.approx(1 - shrunk, abs=0.03)


def test_the_gap_without_a_formula_is_that_of_many_steps() -> None:
    """256 steps: the entries of the mean square have a standard deviation below 0.35 / 16."""
    pairs = RandomPair(1)
    assert Topology.spectral_gap(pairs, 6) == pytest.approx(pairs.spectral_gap(6), abs=0.1)
    assert Weighted(pairs, [1.0] * 6).spectral_gap(6) == pairs.spectral_gap(6)
