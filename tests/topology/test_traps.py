"""Mistakes that decentralized averaging is known for, each made on purpose beside what is done here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ddpcore import TOPOLOGIES, FromGraph, FromMatrix, Matching, OnePeerExponential, RandomPair, Ring, Star, Topology
from ddpcore.topology.describe import describe

ANY_NUMBER = ("complete", "ring", "star", "static_exponential", "random_pair", "one_peer_exponential")
VALUES = np.random.default_rng(0).standard_normal(16)


def averaged(chosen: Topology, values: np.ndarray, num_steps: int) -> np.ndarray:
    for step in range(num_steps):
        values = chosen.matrix(step, len(values)) @ values
    return values


def test_partners_that_each_draws_alone_are_no_matching() -> None:
    """Everyone pulls from somebody of its own choice: columns are off one and the mean drifts. A matching keeps it."""
    generator = np.random.default_rng(1)
    drifting = VALUES
    for _ in range(200):
        drawn = np.array([generator.choice([k for k in range(16) if k != j]) for j in range(16)])
        drifting = (drifting + drifting[drawn]) / 2
    assert abs(drifting.mean() - VALUES.mean()) > 0.01
    paired = averaged(RandomPair(1), VALUES, 200)
    assert abs(paired.mean() - VALUES.mean()) < 1e-15
    assert np.ptp(paired) < 1e-12


def test_uniform_receive_weights_on_a_star_are_refused() -> None:
    """Every learner averages what it gets, evenly: rows sum to one, columns do not, and the centre counts most."""
    n = 8
    uniform = np.eye(n) / 2
    uniform[0], uniform[1:, 0] = 1 / n, 1 / 2
    start = np.arange(n, dtype=np.float64)
    reached = np.linalg.matrix_power(uniform, 500) @ start
    assert np.ptp(reached) < 1e-12
    assert abs(reached[0] - start.mean()) > 0.5
    with pytest.raises(ValueError, match=r"column 0 sums to 3\.625"):
        FromMatrix(uniform)
    np.testing.assert_allclose(averaged(Star(), start, 500), start.mean(), atol=1e-12)


def test_numbers_of_hops_are_counted_in_integers() -> None:
    """Float logarithms are off near powers: of 2^49 + 1, log2 says 49 and hops of 2^49 are left out."""
    assert math.ceil(math.log2(2**49 + 1)) == 49
    assert OnePeerExponential().period(2**49 + 1) == 50
    for power in range(1, 60):
        for n, expected in ((2**power, power), (2**power + 1, power + 1)):
            assert OnePeerExponential().period(n) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ANY_NUMBER)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 9, 15])
def test_odd_numbers_one_and_two(name: str, n: int) -> None:
    """No topology that needs no factors refuses a number, divides by n - 1 = 0 or forgets who is left over."""
    chosen = TOPOLOGIES.build(name)
    chosen.validate(n)
    found = describe(chosen, n)
    assert (found.num_edges == 0) == (n == 1)
    assert found.spectral_gap > 0
    reached = averaged(chosen, VALUES[:n], 3000)
    np.testing.assert_allclose(reached, VALUES[:n].mean(), atol=1e-12)


def test_every_round_of_a_decomposition_has_its_turn() -> None:
    """A ring of 8 with chords falls apart into three matchings. Two of them alone leave it apart."""
    rounds = [[(0, 1), (2, 3), (4, 5), (6, 7)], [(0, 4), (1, 5)], [(1, 2), (3, 4), (5, 6), (7, 0)]]
    seen = set()
    for step in range(3):
        for rank in range(8):
            seen.update((rank, source) for source in Matching(rounds).round(step, rank, 8).sources)
    assert seen == {edge for pairs in rounds for left, right in pairs for edge in ((left, right), (right, left))}
    assert Matching(rounds).period(8) == 3
    Matching(rounds).validate(8)
    with pytest.raises(ValueError, match="not connected"):
        Matching(rounds[:2]).validate(8)


@pytest.mark.parametrize("n", [4, 8, 16, 31])
def test_the_smallest_eigenvalue_decides_average_while_computing(n: int) -> None:
    """w <- W w - lr h w on one quadratic: bounded just below lr h = 1 + smallest eigenvalue, growing just above."""
    smallest = describe(Ring(), n).smallest_eigenvalue
    assert smallest is not None
    mixing = Ring().matrix(0, n)
    for factor, bounded in ((0.99, True), (1.01, False)):
        step = mixing - factor * (1 + smallest) * np.eye(n)
        assert (abs(np.linalg.eigvals(step)).max() < 1) == bounded


def test_reading_and_sending_agree_on_a_digraph_too() -> None:
    """(sources, destinations) turned round are found out where the graph is not symmetric."""
    networkx = pytest.importorskip("networkx")
    chosen = FromGraph(networkx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)]))

    class TurnedRound(type(chosen)):  # type: ignore[misc]
        def __init__(self) -> None:
            turned = [
                type(turn)(turn.self_weight, turn.destinations, turn.weights, turn.sources)
                for turn in chosen.rounds(0, 3)
            ]
            object.__setattr__(self, "_rounds", tuple(turned))

    with pytest.raises(ValueError, match="a weight each"):
        TurnedRound().validate(3, push_sum=True)


def test_all_names_are_tried_here_or_need_factors() -> None:
    assert set(TOPOLOGIES.names()) == {*ANY_NUMBER, "torus_2d", "hypercube", "hierarchical", "scheduled"}
