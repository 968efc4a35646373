"""Random matchings of many learners."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest

from ddpcore import RandomPair
from ddpcore.topology.pairs import random_matching


@pytest.mark.parametrize("n", [4097, 2**18])
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


@pytest.mark.parametrize("n", [4097, 4098])
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
    n, draws = 2**10, 6400
    for rank in (0, 345, n - 1):
        partners = np.array([random_matching(step % 7, step, n)[rank] for step in range(draws)])
        for bins in (partners * 64 // n, partners % 64, abs(partners - rank) % 64, (partners ^ rank) % 64):
            counts = np.bincount(bins, minlength=64)
            assert ((counts - draws / 64) ** 2 / (draws / 64)).sum() < 130


def test_matchings_of_recorded_runs_are_kept() -> None:
    """Up to 4096 learners they are those of earlier versions, bit for bit."""
    for n in (2, 7, 4096):
        partners = [RandomPair(5).round(11, rank, n).sources for rank in range(n)]
        assert partners == [() if rank == p else (p,) for rank, p in enumerate(random_matching(5, 11, n))]
    digest = blake2b(str(random_matching(5, 11, 4096)).encode(), digest_size=8).hexdigest()
    assert random_matching(5, 11, 9) == (3, 4, 2, 0, 1, 8, 7, 6, 5)
    assert digest == "9940203fc5ae61ce"
