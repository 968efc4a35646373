"""Descriptions: every number against its definition, on matrices of a few learners and for thousands."""

from __future__ import annotations

import math
import tracemalloc
from functools import partial
from itertools import product

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ddpcore import (
    Complete,
    FromGraph,
    FromMatrix,
    Hierarchical,
    Hypercube,
    Matching,
    OnePeerExponential,
    RandomPair,
    Ring,
    Round,
    Scheduled,
    Star,
    StaticExponential,
    Topology,
    Torus2D,
    Weighted,
)
from ddpcore.topology import base
from ddpcore.topology.describe import describe
from ddpcore.topology.wrapped import BetweenGroups, Damped, Slowed

PATH = Matching([[(0, 1), (2, 3), (4, 5)], [(1, 2), (3, 4)]])
OF_SIX = [
    Complete(), Ring(), Ring(2), Star(), Torus2D(), StaticExponential(), RandomPair(1), OnePeerExponential(),
    Hierarchical(2), Hierarchical(3, RandomPair()), PATH, FromGraph(nx.path_graph(6)),
]  # fmt: skip


@pytest.mark.parametrize("chosen", OF_SIX, ids=repr)
def test_numbers_are_those_of_the_matrices(chosen: Topology) -> None:
    n = 6
    found = describe(chosen, n)
    steps = chosen.period(n) or base.RANDOM_STEPS
    matrices = [chosen.matrix(step, n) for step in range(steps)]
    sent = np.array([((mixing > 0) & ~np.eye(n, dtype=bool)).sum(axis=0) for mixing in matrices])
    union = sum(matrices) > 0
    assert found.num_learners == n
    assert found.period == chosen.period(n)
    assert found.num_edges == union.sum() - union.trace()
    assert (found.degree_min, found.degree_max) == (sent.min(), sent.max())
    assert found.degree_mean == found.models_sent_per_step == pytest.approx(sent.mean())
    assert found.messages_per_step == pytest.approx(sent.sum() / steps)
    assert found.doubly_stochastic
    assert found.spectral_gap == chosen.spectral_gap(n)
    if len(matrices) == 1 and np.array_equal(matrices[0], matrices[0].T):
        assert found.smallest_eigenvalue == pytest.approx(np.linalg.eigvalsh(matrices[0])[0], abs=1e-12)
    else:
        assert found.smallest_eigenvalue is None


@pytest.mark.parametrize("epsilon", [0.5, 1 / math.e, 1e-3])
@pytest.mark.parametrize("chosen", [Ring(), Star(), StaticExponential(), OnePeerExponential(), PATH], ids=repr)
def test_mixing_time_is_the_first_period_that_suffices(chosen: Topology, epsilon: float) -> None:
    """The norm of a power of a normal product is the power of its norm; of the path, which is none, that is a bound."""
    n = 6
    found, period = describe(chosen, n, epsilon=epsilon), chosen.period(n) or 0
    product = np.eye(n)
    for step in range(period):
        product = chosen.matrix(step, n) @ product

    def left(steps: float) -> float:
        return float(np.linalg.norm(np.linalg.matrix_power(product, int(steps) // period) - 1 / n, 2))

    assert found.epsilon == epsilon
    assert found.mixing_time % period == 0
    assert left(found.mixing_time) <= epsilon * (1 + 1e-9)
    if chosen is not PATH and found.mixing_time > period:
        assert left(found.mixing_time - period) > epsilon


def test_mixing_time_of_random_pairs() -> None:
    """(1 - gap)^t is the expected square: for 4 learners a third remains after each step."""
    assert describe(RandomPair(), 4, epsilon=1 / 3).mixing_time == 2
    assert describe(RandomPair(), 4, epsilon=0.33).mixing_time == 3
    assert describe(RandomPair(), 2).mixing_time == 1


def test_mixing_time_of_a_schedule_is_that_of_its_last_stage() -> None:
    for last, n in product((Ring(), OnePeerExponential(), RandomPair()), (8, 16)):
        alone = describe(last, n)
        schedules = Scheduled([(0, last)]), Scheduled([(0, Star()), (5, Scheduled([(0, last)]))])
        for chosen in (*schedules, Weighted(schedules[1], (2.0,) * n)):
            found = describe(chosen, n)
            assert (found.spectral_gap, found.mixing_time) == (alone.spectral_gap, alone.mixing_time)
        for wrap in (
            partial(Weighted, weights=(2.0, *(1.0,) * (n - 1))), partial(Damped, share=0.3), partial(Hierarchical, 2),
            lambda one, n=n: Damped(Weighted(one, (1.0, *(2.0,) * (n - 1))), 0.5), partial(BetweenGroups, 2),
            partial(Slowed, rounds_of=lambda step: step // 3),
        ):  # fmt: skip
            found, alone = describe(wrap(schedules[1]), n), describe(wrap(last), n)
            assert (found.spectral_gap, found.mixing_time) == (alone.spectral_gap, alone.mixing_time)
        alone = describe(last, n)
        if last == Ring():
            assert alone.mixing_time == {8: 5, 16: 20}[n]


def test_mixing_time_of_what_never_and_what_need_not_mix() -> None:
    assert describe(FromMatrix([[0, 1], [1, 0]]), 2).mixing_time == math.inf
    assert describe(Ring(), 1).mixing_time == 0
    assert describe(Complete(), 9).mixing_time == 1
    assert describe(OnePeerExponential(), 8).mixing_time == 3


@pytest.mark.parametrize("epsilon", [0.0, 1.0, -1.0, math.nan])
def test_impossible_epsilon(epsilon: float) -> None:
    with pytest.raises(ValueError, match="epsilon is"):
        describe(Ring(), 4, epsilon=epsilon)


def test_impossible_numbers() -> None:
    with pytest.raises(ValueError, match="num_learners"):
        describe(Ring(), 0)
    with pytest.raises(ValueError, match="no power of two"):
        describe(Hypercube(), 12)


# --- invariants of any topology, world and step ------------------------------------------------------------------

ANY = st.one_of(
    st.sampled_from([Complete(), Star(), Torus2D(), Hypercube(), StaticExponential(), OnePeerExponential()]),
    st.builds(Ring, st.integers(1, 4)),
    st.builds(RandomPair, st.integers(0, 2**40)),
    st.builds(
        Hierarchical,
        st.integers(1, 4),
        st.sampled_from([Ring(), Complete(), RandomPair(3), OnePeerExponential(), Star(), Hypercube()]),
    ),
)


@settings(max_examples=150, deadline=None)
@given(ANY, st.integers(1, 24), st.integers(0, 10**6), st.integers(0, 2**32 - 1))
def test_invariants(chosen: Topology, n: int, step: int, seed: int) -> None:
    """Sends meet receives, the mean stays, and over a period differences shrink by the gap at least."""
    try:
        chosen.validate(n)
    except ValueError:
        assume(False)
    rounds = chosen.rounds(step, n)
    sends = {(rank, reader) for rank, turn in enumerate(rounds) for reader in turn.destinations}
    receives = {(source, rank) for rank, turn in enumerate(rounds) for source in turn.sources}
    assert sends == receives
    assert len(sends) == sum(len(turn.destinations) for turn in rounds)

    values = np.random.default_rng(seed).standard_normal((n, 3))
    mean, start = values.mean(axis=0), values - values.mean(axis=0)
    period, gap = chosen.period(n), chosen.spectral_gap(n)
    first = step if period is None else step - step % period
    for later in range(first, first + (period or 1)):
        before, mixing = values, chosen.mixing_matrix(later, n)
        values = np.stack([mixing @ column for column in values.T], axis=1)
        np.testing.assert_allclose(values.mean(axis=0), mean, atol=1e-14)
        assert np.linalg.norm(values - mean) <= np.linalg.norm(before - mean) * (1 + 1e-12) + 1e-13
    if period is not None:
        assert np.linalg.norm(values - mean) <= ((1 - gap) ** period + 1e-12) * np.linalg.norm(start)


# --- thousands ---------------------------------------------------------------------------------------------------


def random_regular(n: int) -> FromGraph:
    return FromGraph(nx.random_regular_graph(4, n, seed=1))


MAKERS = {
    "complete": lambda n: Complete(),
    "ring": lambda n: Ring(),
    "star": lambda n: Star(),
    "torus": lambda n: Torus2D(),
    "exponential": lambda n: StaticExponential(),
    "one_peer": lambda n: OnePeerExponential(),
    "pairs": lambda n: RandomPair(),
    "hosts": lambda n: Hierarchical(8),
    "path": lambda n: FromGraph(nx.path_graph(n)),
    "regular": random_regular,
}
DENSE = ("star", "path", "regular")  # their eigenvalues need a matrix [n, n]
THOUSANDS = [pytest.param(n, marks=pytest.mark.slow if n > 64 else ()) for n in (64, 2048)]


@pytest.mark.parametrize("n", THOUSANDS)
@pytest.mark.parametrize("name", MAKERS)
def test_thousands_need_no_dense_matrix(name: str, n: int) -> None:
    """Validated and stepped in less memory than half of a float64 [n, n] (of 64 it may be more). Most are described."""
    tracemalloc.start()
    try:
        chosen = MAKERS[name](n)
        chosen.validate(n)
        if name not in DENSE:
            assert 0 < describe(chosen, n).spectral_gap <= 1
        if chosen != Complete():
            chosen.mixing_matrix(3, n)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert n == 64 or peak < 8 * n * n / 2


class _Held(Topology):
    """A user's own topology around another, without the fields of a dataclass."""

    def __init__(self, held: Topology) -> None:
        self.held = held

    def period(self, num_learners: int) -> int | None:
        return self.held.period(num_learners)

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        return self.held.round(step, rank, num_learners)


def test_a_schedule_inside_of_a_topology_ends_with_the_run_too() -> None:
    stages = Scheduled([(0, Complete()), (600, Ring())])
    for one in (stages, _Held(stages), Hierarchical(2, stages), Damped(stages, 0.5), BetweenGroups(2, stages)):
        one.check_run(601)
        with pytest.raises(ValueError, match="has the step 600: the run ends after 600 steps"):
            one.check_run(600)


def test_a_topology_of_a_user_has_the_gap_of_the_last_stage_too() -> None:
    held = _Held(Scheduled([(0, Complete()), (600, Ring())]))
    assert describe(held, 8).mixing_time == describe(Ring(), 8).mixing_time
    assert held.spectral_gap(8) == pytest.approx(Ring().spectral_gap(8))
