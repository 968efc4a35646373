"""Random matchings of more learners than are drawn whole: a keyed permutation gives each rank its partner alone."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpcore import RandomPair
from ddpcore.topology.keyed import KeyedPermutation
from ddpcore.topology.pairs import MOST_PERMUTED, random_matching


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 2**62), st.binary(max_size=20), st.data())
def test_the_inverse(size: int, key: bytes, data: st.DataObject) -> None:
    order, number = KeyedPermutation(size, key), data.draw(st.integers(0, size - 1))
    assert 0 <= order(number) < size
    assert order.inverse(order(number)) == order(order.inverse(number)) == number


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 64, 65, 1000, 4097])
def test_it_is_a_permutation(size: int) -> None:
    order = KeyedPermutation(size, b"key")
    values = [order(number) for number in range(size)]
    assert sorted(values) == list(range(size))
    assert order.values().tolist() == values
    assert size < 64 or values != [KeyedPermutation(size, b"other")(number) for number in range(size)]


def test_all_permutations_are_about_equally_frequent() -> None:
    """Of four numbers: chi-square of 24 permutations in 24,000 draws, 23 degrees of freedom, p = 1e-6 at 70."""
    counts: dict[tuple[int, ...], int] = {}
    for draw in range(24_000):
        order = KeyedPermutation(4, str(draw).encode())
        found = tuple(order(number) for number in range(4))
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 24
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 70


@pytest.mark.parametrize("n", [MOST_PERMUTED + 1, MOST_PERMUTED + 2, 2**20, 2**20 + 1])
def test_partners_are_partners_of_each_other(n: int) -> None:
    """Involution; and for odd n one learner is idle."""
    pairs, idle = RandomPair(3), 0
    for rank in (*range(500), n - 1):
        round_ = pairs.round(7, rank, n)
        if not round_.sources:
            idle += 1
            continue
        (partner,) = round_.sources
        assert partner != rank
        assert 0 <= partner < n
        assert pairs.round(7, partner, n).sources == (rank,)
        assert round_.destinations == (partner,)
    assert idle <= n % 2


@pytest.mark.parametrize("n", [MOST_PERMUTED + 1, MOST_PERMUTED + 2])
def test_all_rounds_at_once_are_the_same(n: int) -> None:
    pairs = RandomPair(2)
    rounds = pairs.rounds(5, n)
    assert rounds == [pairs.round(5, rank, n) for rank in range(n)]
    assert sum(not round_.sources for round_ in rounds) == n % 2
    other = pairs.rounds(6, n)
    assert sum(mine.sources == theirs.sources for mine, theirs in zip(rounds, other, strict=True)) < 10


def test_partners_are_uniform() -> None:
    """Partners of three ranks over steps and seeds, in 64 bins: chi-square, 63 degrees of freedom, p = 1e-6 at 130.

    Also the distance of partners, modulo 64: partners are not neighbours more often than others.
    """
    n, draws = 2**20, 6400
    for rank in (0, 12345, n - 1):
        partners = np.array([RandomPair(step % 7).round(step, rank, n).sources[0] for step in range(draws)])
        for bins in (partners * 64 // n, partners % 64, abs(partners - rank) % 64, (partners ^ rank) % 64):
            counts = np.bincount(bins, minlength=64)
            assert ((counts - draws / 64) ** 2 / (draws / 64)).sum() < 130
        assert len(set(partners.tolist())) > draws - 60  # about 20 repetitions are expected


def test_matchings_of_recorded_runs_are_kept() -> None:
    """Up to 4096 learners they are those of earlier versions, bit for bit."""
    for n in (2, 7, 4096):
        partners = [RandomPair(5).round(11, rank, n).sources for rank in range(n)]
        assert partners == [() if rank == p else (p,) for rank, p in enumerate(random_matching(5, 11, n))]
    digest = blake2b(str(random_matching(5, 11, 4096)).encode(), digest_size=8).hexdigest()
    assert random_matching(5, 11, 9) == (3, 4, 2, 0, 1, 8, 7, 6, 5)
    assert digest == "9940203fc5ae61ce"
