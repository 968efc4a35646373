"""Topologies: sound exchanges, known spectral gaps, and the same answer for anyone who asks in any order."""

from __future__ import annotations

import math
import pickle
import random
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

import ddpcore
from ddpcore import TOPOLOGIES, Complete, FromMatrix, OnePeerExponential, RandomPair, Ring, Round, Topology
from ddpcore.topology.pairs import random_matching
from ddpcore.topology.wrapped import Slowed, redrawn
from helpers.each import each

ALL = [Complete(), Ring(), RandomPair(), RandomPair(7), OnePeerExponential()]
SIZES = range(1, 10)


@each("num_learners", [*SIZES, 16, 17])
@pytest.mark.parametrize("chosen", ALL, ids=repr)
def test_every_round_is_sound_for_any_number_of_learners(chosen: Topology, num_learners: int) -> None:
    chosen.validate(num_learners)
    for step in range(8):
        mixing = chosen.matrix(step, num_learners)
        assert mixing.shape == (num_learners, num_learners)
        assert mixing.dtype == np.float64
        assert (mixing >= 0).all()
        np.testing.assert_allclose(mixing.sum(axis=0), 1, atol=1e-15)
        np.testing.assert_allclose(mixing.sum(axis=1), 1, atol=1e-15)
        for rank in range(num_learners):
            turn = chosen.round(step, rank, num_learners)
            others = [other for other in range(num_learners) if other != rank]
            assert turn.sources == tuple(other for other in others if mixing[rank, other] > 0)
            assert turn.weights == tuple(mixing[rank, other] for other in turn.sources)
            assert turn.destinations == tuple(other for other in others if mixing[other, rank] > 0)
            assert turn.self_weight == mixing[rank, rank] == 1 / (len(turn.sources) + 1)


@each("num_learners", SIZES)
@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_random_pair_is_a_perfect_matching(seed: int, num_learners: int) -> None:
    for step in [*range(100), 10**9, 2**40]:
        rounds = [RandomPair(seed).round(step, rank, num_learners) for rank in range(num_learners)]
        idle = [rank for rank, turn in enumerate(rounds) if not turn.sources]
        assert len(idle) == num_learners % 2
        for rank, turn in enumerate(rounds):
            if rank in idle:
                assert turn == Round(1.0, (), (), ())
            else:
                (partner,) = turn.sources
                assert partner != rank
                assert rounds[partner].sources == (rank,)
                assert turn == Round(0.5, (partner,), (0.5,), (partner,))


@pytest.mark.parametrize("num_learners", [4, 5])
def test_random_pair_draws_every_matching_equally_often(num_learners: int) -> None:
    num_steps = 6000
    mean = sum(RandomPair(3).matrix(step, num_learners) for step in range(num_steps)) / num_steps
    # a weight of 1/2 with probability p <= 1/3 has a standard deviation below 0.24 / sqrt(6000) = 0.003
    others, is_even = np.ones((num_learners, num_learners)), num_learners % 2 == 0
    expected = (others - np.eye(num_learners)) / (num_learners - 1) if is_even else others / num_learners
    np.testing.assert_allclose(mean, (np.eye(num_learners) + expected) / 2, atol=0.015)


@pytest.mark.parametrize("num_learners", [2, 3, 8, 9])
def test_random_rounds_keep_the_mean_and_bring_agreement(num_learners: int) -> None:
    values = np.random.default_rng(0).standard_normal(num_learners)
    mean = math.fsum(values) / num_learners
    for step in range(200):
        values = RandomPair(1).matrix(step, num_learners) @ values
    assert abs(math.fsum(values) / num_learners - mean) < 1e-15
    assert np.ptp(values) < 1e-12


def test_random_pair_is_stateless_and_leaves_global_generators_alone() -> None:
    asked = [(step, rank) for step in range(40) for rank in range(7)]
    in_order = {key: RandomPair(5).round(*key, 7) for key in asked}
    random.Random(0).shuffle(asked)
    random_matching.cache_clear()
    python_state, numpy_state = random.getstate(), str(np.random.get_state())
    assert {key: RandomPair(5).round(*key, 7) for key in asked} == in_order
    assert random.getstate() == python_state
    assert str(np.random.get_state()) == numpy_state


def test_random_pair_is_the_same_on_every_machine() -> None:
    partners = [[RandomPair(0).round(step, rank, 6).sources[0] for rank in range(6)] for step in range(3)]
    assert partners == [[3, 4, 5, 0, 1, 2], [1, 0, 3, 2, 5, 4], [2, 5, 0, 4, 3, 1]]


def test_seeds_and_steps_change_the_matching() -> None:
    def matrices(seed: int, first: int) -> list[bytes]:
        return [RandomPair(seed).matrix(step, 8).tobytes() for step in range(first, first + 20)]

    assert matrices(0, 0) == matrices(0, 0)
    assert matrices(0, 0) != matrices(1, 0)
    assert matrices(0, 0) != matrices(0, 1)
    assert matrices(0, 1) != matrices(1, 0)  # seed and step must not be added up
    assert len(set(matrices(0, 0))) > 15  # of 105 matchings


def test_ring_is_the_documented_matrix() -> None:
    np.testing.assert_array_equal(Ring().matrix(3, 1), [[1]])
    np.testing.assert_array_equal(Ring().matrix(3, 2), [[1 / 2, 1 / 2], [1 / 2, 1 / 2]])
    third = 1 / 3
    np.testing.assert_array_equal(
        Ring().matrix(3, 4), [[third, third, 0, third], [third] * 3 + [0], [0] + [third] * 3, [third, 0, third, third]]
    )
    assert Ring(2).round(0, 0, 7) == Round(0.2, (1, 2, 5, 6), (0.2,) * 4, (1, 2, 5, 6))


@pytest.mark.parametrize("share", [0, 0.05, 0.5, 0.95])
def test_a_ring_with_a_share_for_itself(share: float) -> None:
    ring = Ring(self_weight=share)
    side = (1 - share) / 2
    np.testing.assert_array_equal(ring.matrix(0, 4)[1], [side, share, side, 0])
    assert np.linalg.eigvalsh(ring.matrix(0, 6))[0] == pytest.approx(2 * share - 1, abs=1e-12), "as documented"
    assert Ring(2, share).round(0, 0, 7) == Round(share, (1, 2, 5, 6), ((1 - share) / 4,) * 4, (1, 2, 5, 6))
    assert ring.round(0, 0, 2) == Round(share, (1,), (1 - share,), (1,))
    assert ring.round(0, 0, 1) == Round(1.0, (), (), ()), "alone it has nobody to share with"


@pytest.mark.parametrize("num_learners", [1, 2, 4])
def test_a_wide_ring_names_the_smallest_world(num_learners: int) -> None:
    with pytest.raises(ValueError, match="at least 5 learners"):
        Ring(2).round(0, 0, num_learners)
    with pytest.raises(ValueError, match="at least 5 learners"):
        Ring(2).validate(num_learners)


def test_one_peer_exponential_hops() -> None:
    assert [OnePeerExponential().round(step, 0, 6) for step in range(4)] == [
        Round(0.5, (5,), (0.5,), (1,)),
        Round(0.5, (4,), (0.5,), (2,)),
        Round(0.5, (2,), (0.5,), (4,)),
        Round(0.5, (5,), (0.5,), (1,)),
    ]
    assert [OnePeerExponential().period(n) for n in (1, 2, 3, 4, 5, 8, 9, 243, 2**49, 2**49 + 1)] == [
        *(1, 1, 2, 2, 3, 3, 4, 8, 49, 50),
    ]


@pytest.mark.parametrize("num_learners", [1, 2, 4, 8, 16, 32])
def test_one_peer_exponential_is_the_exact_mean_after_a_period(num_learners: int) -> None:
    chosen = OnePeerExponential()
    for first in range(3):  # from any step on
        product = np.eye(num_learners)
        for step in range(first, first + chosen.period(num_learners)):
            product = chosen.matrix(step, num_learners) @ product
        np.testing.assert_array_equal(product, np.full_like(product, 1 / num_learners))
    assert chosen.spectral_gap(num_learners) == 1.0


@pytest.mark.parametrize("num_learners", [3, 5, 6, 7, 12])
def test_one_peer_exponential_gap_for_other_numbers(num_learners: int) -> None:
    chosen = OnePeerExponential()
    period = chosen.period(num_learners)
    # the product is circulant: the mean of the first 2^T powers of the shift
    angles = 2j * np.pi * np.arange(1, num_learners) / num_learners
    eigenvalues = np.exp(np.outer(angles, np.arange(2**period))).mean(axis=1)
    expected = 1 - np.abs(eigenvalues).max() ** (1 / period)
    assert chosen.spectral_gap(num_learners) == pytest.approx(expected, abs=1e-12)
    assert 0.3 < expected < 1


@pytest.mark.parametrize("num_learners", [2, 3, 4, 5, 8, 16])
def test_gaps_in_closed_form(num_learners: int) -> None:
    n = num_learners
    assert Complete().spectral_gap(n) == 1.0
    eigenvalues = [(1 + 2 * math.cos(2 * math.pi * k / n)) / 3 for k in range(1, n)]
    ring = 1.0 if n == 2 else 1 - max(map(abs, eigenvalues))
    assert Ring().spectral_gap(n) == pytest.approx(ring, abs=1e-12)
    expected = n / (2 * n - 2) if n % 2 == 0 else 1 / 2
    assert RandomPair().spectral_gap(n) == pytest.approx(expected, abs=1e-12)


class CompleteOfPeriodFour(Complete):
    """The complete average, said to repeat after four steps."""

    def period(self, num_learners: int) -> int:
        return 4


@pytest.mark.parametrize("num_learners", [3, 6, 7, 11])
def test_a_gap_does_not_take_the_root_of_rounding(num_learners: int) -> None:
    assert CompleteOfPeriodFour().spectral_gap(num_learners) == 1.0


def test_one_learner_agrees_with_itself() -> None:
    for chosen in [*ALL, FromMatrix([[1.0]])]:
        assert chosen.spectral_gap(1) == 1.0
        assert chosen.round(0, 0, 1) == Round(1.0, (), (), ())


def test_random_gap_is_how_fast_the_expected_squared_distance_shrinks() -> None:
    worst = np.array([1.0, -1.0, 0, 0, 0, 0])  # any vector of mean 0 is an eigenvector of E[W^T W]
    num_steps = 4000
    shrunk = np.mean([((RandomPair(2).matrix(step, 6) @ worst) ** 2).sum() for step in range(num_steps)]) / 2
    assert 1 - shrunk == pytest.approx(RandomPair().spectral_gap(6), abs=0.03)


def test_topologies_are_values() -> None:
    assert RandomPair(1) == RandomPair(1) != RandomPair(2)
    assert Ring() == Ring(1) != Ring(2)
    mixing = Ring().matrix(0, 5)
    assert FromMatrix(mixing) == FromMatrix(mixing.tolist()) != FromMatrix(Complete().matrix(0, 5))
    assert len({Complete(), Complete(), Ring(), RandomPair(), FromMatrix(mixing), FromMatrix(mixing)}) == 4
    with pytest.raises(FrozenInstanceError):
        Ring().neighbors_each_side = 2  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(FromMatrix(mixing)))
    assert copy == FromMatrix(mixing)
    assert copy.round(0, 1, 5) == Ring().round(0, 1, 5)


def test_from_matrix_is_that_matrix_and_keeps_it() -> None:
    # directed and irregular: mixes a rotation, a swap and the identity
    rotation, swap, identity = np.eye(4)[[1, 2, 3, 0]], np.eye(4)[[1, 0, 2, 3]], np.eye(4)
    mixing = 0.5 * rotation + 0.25 * swap + 0.25 * identity
    chosen = FromMatrix(mixing)
    expected = mixing.copy()
    mixing[:] = 0
    np.testing.assert_array_equal(chosen.matrix(9, 4), expected)
    assert chosen.round(9, 0, 4) == Round(0.25, (1,), (0.75,), (1, 3))
    assert chosen.round(9, 3, 4) == Round(0.5, (0,), (0.5,), (2,))
    second = np.linalg.svd(expected, compute_uv=False)[1]
    assert chosen.spectral_gap(4) == pytest.approx(1 - second, abs=1e-12)
    with pytest.raises(ValueError, match="for 4 learners cannot serve 3"):
        chosen.round(0, 0, 3)


def test_a_connected_matrix_that_only_swaps_has_no_gap() -> None:
    assert FromMatrix([[0, 1], [1, 0]]).spectral_gap(2) == 0.0


def test_from_matrix_allows_float32_rounding() -> None:
    rounded = FromMatrix(Ring().matrix(0, 7).astype(np.float32))
    np.testing.assert_allclose(rounded.matrix(0, 7), Ring().matrix(0, 7), atol=1e-7)
    assert rounded.spectral_gap(7) == pytest.approx(Ring().spectral_gap(7), abs=1e-6)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[0.5, 0.5]], "square"),
        ([1.0], "square"),
        (np.ones((0, 0)), "square"),
        ([[1, np.nan], [0, 1]], "NaN or infinity"),
        ([[1.5, -0.5], [-0.5, 1.5]], "negative"),
        ([[0.9, 0.1], [0.2, 0.8]], "column 0 sums to 1.1"),
        ([[0.5, 0.5 + 3e-6], [0.5, 0.5]], "sums to"),
        (np.eye(3), "not connected"),
        (np.kron(np.eye(2), np.full((2, 2), 0.5)), "not connected"),
    ],
)
def test_from_matrix_refuses_a_wrong_matrix_in_one_line(matrix: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        FromMatrix(matrix)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


class Spoiled(Topology):
    """A ring of four with one learner's round changed."""

    def __init__(self, rank: int, **changes: Any) -> None:
        self.rank, self.changes = rank, changes

    def period(self, num_learners: int) -> int:
        return 1

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        turn = Ring().round(step, rank, num_learners)
        return replace(turn, **self.changes) if rank == self.rank else turn


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"destinations": (1,)}, r"learner 2 sends to \(1,\) but \(1, 3\) read"),
        ({"destinations": (0, 1, 3)}, "make them agree"),
        ({"sources": (3, 1)}, "ascend"),
        ({"sources": (1, 2)}, "ascend"),
        ({"weights": (1 / 3,)}, "a weight each"),
        ({"sources": (1, 4)}, "reads from 4"),
        ({"weights": (1 / 3, 1 / 2)}, "row 2 sums to"),
        ({"weights": (0.0, 2 / 3)}, "column 1 sums to"),
        ({"weights": (1 / 3, float("nan"))}, "NaN"),
    ],
)
def test_validate_finds_a_wrong_round(changes: dict[str, Any], message: str) -> None:
    Spoiled(-1).validate(4)
    with pytest.raises(ValueError, match=message):
        Spoiled(2, **changes).validate(4)


class Halves(RandomPair):
    """Random, but learners 0, 1 and 2, 3 never meet."""

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        return Round(0.5, (rank ^ 1,), (0.5,), (rank ^ 1,))


def test_validate_finds_random_pairs_that_never_connect() -> None:
    with pytest.raises(ValueError, match="not connected"):
        Halves().validate(4)


@pytest.mark.parametrize("chosen", [*ALL, FromMatrix([[1.0]])], ids=repr)
def test_impossible_questions(chosen: Topology) -> None:
    for num_learners in (0, -1):
        for question in (chosen.validate, chosen.spectral_gap, lambda n: chosen.matrix(0, n)):
            with pytest.raises(ValueError, match="num_learners"):
                question(num_learners)
        with pytest.raises(ValueError, match="num_learners"):
            chosen.round(0, 0, num_learners)
    for rank in (1, -1):
        with pytest.raises(ValueError, match="rank"):
            chosen.round(0, rank, 1)
    with pytest.raises(ValueError, match="step"):
        chosen.round(-1, 0, 1)


def test_impossible_fields() -> None:
    with pytest.raises(ValueError, match="neighbors_each_side"):
        Ring(0)
    for share in (-0.1, 1, float("nan"), "much"):
        with pytest.raises(ValueError, match="self_weight"):
            Ring(self_weight=share)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed"):
        RandomPair(-1)


def test_build_by_name() -> None:
    built = [
        TOPOLOGIES.build(name, seed=4, **({"local_size": 3} if name == "hierarchical" else {}))
        for name in TOPOLOGIES.names()
    ]
    assert built == [
        Complete(),
        Ring(),
        ddpcore.Star(),
        ddpcore.Torus2D(),
        ddpcore.Hypercube(),
        ddpcore.StaticExponential(),
        RandomPair(4),
        OnePeerExponential(),
        ddpcore.Hierarchical(3),
        ddpcore.Scheduled([(0, Ring())]),
    ]
    assert TOPOLOGIES.build("random_pair") == RandomPair(0)
    assert TOPOLOGIES.build("ring", neighbors_each_side=2) == Ring(2)
    with pytest.raises(ValueError, match=r"topology 'rnig': did you mean 'ring'\?"):
        TOPOLOGIES.build("rnig")
    with pytest.raises(ValueError, match="unknown topology 'xyz': choose from complete"):
        TOPOLOGIES.build("xyz")


@pytest.mark.parametrize(("topology", "period"), [(Ring(), 1), (OnePeerExponential(), None), (RandomPair(3), None)])
def test_a_slowed_topology_has_each_round_for_several_steps(topology: Topology, period: int | None) -> None:
    slowed = Slowed(topology, lambda step: step // 3)
    for step in range(12):
        assert slowed.rounds(step, 4) == topology.rounds(step // 3, 4)
    assert slowed.period(4) == period
    slowed.validate(4)
    assert redrawn(slowed, 3) == slowed
