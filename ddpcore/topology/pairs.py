"""Rounds of pairs: each learner has one partner a step, or none; partners average half and half."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

import numpy as np

from ddpcore.topology.base import Matrix, Topology, check
from ddpcore.topology.rounds import Round, uniform

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RandomPair(Topology):
    """A new random perfect matching each step; partners average half and half, one learner idles when n is odd.

    The matching is a function of (seed, step, n) alone, so every rank computes the same one without a word exchanged.
    Partners drawn by each learner alone would not be a matching: columns of W off one, and the mean drifts.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"RandomPair: seed is {self.seed}, it must be at least 0")

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """The partner, weights 1/2; the idle one keeps its own."""
        check(step, rank, num_learners)
        return _with_partner(rank, random_matching(self.seed, step, num_learners)[rank])

    def period(self, num_learners: int) -> None:
        """None: no step repeats."""

    def expected_square(self, num_learners: int) -> Matrix:
        """(I + E[M]) / 2 with M the matching's permutation matrix: W = (I + M) / 2 is a projection, so W^T W = W.

        Even n: E[M] = (J - I) / (n - 1). Odd n: also idle with probability 1 / n, so J / n.
        """
        check(0, 0, num_learners)
        identity, ones = np.eye(num_learners), np.ones((num_learners, num_learners))
        expected = ones / num_learners if num_learners % 2 else (ones - identity) / (num_learners - 1)
        return (identity + expected) / 2

    def spectral_gap(self, num_learners: int) -> float:
        """That of `expected_square`: n / (2n - 2) for even n, 1/2 for odd n; 1.0 for one learner."""
        check(0, 0, num_learners)
        if num_learners == 1:
            return 1.0
        return 0.5 if num_learners % 2 else num_learners / (2 * num_learners - 2)


@dataclass(frozen=True, init=False)
class Matching(Topology):
    """A given list of rounds of pairs, one a step, from the first again after the last; partners average half and half.

    As in MATCHA (Wang et al. 2019), whose rounds are the matchings into which a graph falls apart; here each has its
    turn. Whoever is in no pair of a round idles in it.

    ValueError if there are no rounds, a learner is twice in a round, its own partner or negative; when used, if a pair
    names a learner that is not there, or if the rounds together do not connect all.
    """

    rounds_of_pairs: tuple[Pairs, ...]
    _partners: tuple[dict[int, int], ...] = field(repr=False, compare=False)
    _last: int = field(repr=False, compare=False)  # learner that is named

    def __init__(self, rounds_of_pairs: Iterable[Iterable[tuple[int, int]]]) -> None:
        given = tuple(tuple((int(left), int(right)) for left, right in pairs) for pairs in rounds_of_pairs)
        if not given:
            raise ValueError("Matching: there are no rounds, give at least one list of pairs")
        for step, pairs in enumerate(given):
            for rank, times in Counter(chain.from_iterable(pairs)).items():
                if rank < 0:
                    raise ValueError(f"Matching: round {step} names learner {rank}: count them from 0")
                if times > 1:
                    raise ValueError(
                        f"Matching: learner {rank} is twice in round {step}, it can have one partner: move a pair "
                        "to another round"
                    )
        object.__setattr__(self, "rounds_of_pairs", given)
        both_ways = (chain(pairs, ((right, left) for left, right in pairs)) for pairs in given)
        partners = tuple(map(dict, both_ways))
        object.__setattr__(self, "_partners", partners)
        object.__setattr__(self, "_last", max(chain.from_iterable(partners), default=0))

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """The partner of this round, weights 1/2, or nobody."""
        check(step, rank, num_learners)
        if self._last >= num_learners:
            raise ValueError(
                f"Matching: a round names learner {self._last} and there are {num_learners}: leave the pair out, or "
                "take more learners"
            )
        return _with_partner(rank, self._partners[step % len(self._partners)].get(rank, rank))

    def period(self, num_learners: int) -> int:
        """The number of rounds."""
        return len(self._partners)


def _with_partner(rank: int, partner: int) -> Round:
    partners = () if partner == rank else (partner,)
    return uniform(partners, partners)


@lru_cache(maxsize=16)  # every rank of a virtual world, and the matrix, ask for the same few steps
def random_matching(seed: int, step: int, num_learners: int) -> tuple[int, ...]:
    """Partner of each learner, itself if idle: neighbours in a random order pair up.

    The order comes from sorting raw Philox bits, which NumPy promises to keep across versions and machines; the
    streams of its higher samplers (permutation, shuffle) may change, and ranks that disagree would average wrongly.
    """
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(step,))).random_raw(num_learners)
    order = np.argsort(bits, kind="stable")
    paired = num_learners - num_learners % 2
    left, right = order[0:paired:2], order[1:paired:2]
    partner = np.arange(num_learners)
    partner[left], partner[right] = right, left
    return tuple(partner.tolist())
