"""Topologies of pairs: each learner has at most one partner at a step."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

import numpy as np

from ddpcore.options.typed import check_range, typed
from ddpcore.topology.base import Topology, check
from ddpcore.topology.rounds import Round


@dataclass(frozen=True)
class RandomPair(Topology):
    """A new random matching at each step; partners take the mean of their weights. If n is odd, one learner is idle.

    The matching is a function of (seed, step, n), so all ranks compute the same one without communication. If each
    learner drew its own partner, columns of W would not sum to one, and the mean over learners would change.

    With ``num_partners`` k, a step has k independent matchings M_i, and ``W = (I + sum_i M_i) / (k + 1)``. A partner
    that is drawn twice counts twice.
    """

    seed: int = 0
    num_partners: int = 1

    def __post_init__(self) -> None:
        check_range("RandomPair: seed", typed("RandomPair: seed", self.seed, int), least=0)
        name = "RandomPair: num_partners"
        check_range(name, typed(name, self.num_partners, int), least=1, most=2**16)

    def __repr__(self) -> str:
        more = "" if self.num_partners == 1 else f", num_partners={self.num_partners}"
        return f"RandomPair(seed={self.seed}{more})"

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """The partners, each with the weight of the learner itself; an idle learner keeps its weights."""
        check(step, rank, num_learners)
        draws = range(self.num_partners)
        return _with_partners(rank, [random_matching(self.seed, step, num_learners, i)[rank] for i in draws])

    def period(self, num_learners: int) -> None:
        """None: the rounds do not repeat."""

    def kept(self, num_learners: int) -> tuple[float, float]:
        """What an average leaves of the differences between learners: e and s, with E[W] d = e d and E[W^2] d = s d.

        d is any vector that sums to zero.
        """
        k, others = self.num_partners, num_learners - 1
        mean = (1 - k / others if others % 2 else 1.0) / (k + 1)  # with odd n a learner is idle: E[M] d = 0
        return mean, 1 - self.spectral_gap(num_learners)

    def spectral_gap(self, num_learners: int) -> float:
        """In closed form: with one partner n / (2n - 2) for even n, and 1/2 for odd n; 1.0 for one learner.

        E[W^2] = ((k + 1) I + 2 k E[M] + k (k - 1) E[M]^2) / (k + 1)^2, with M the permutation of a matching: M^2 = I.
        Even n: E[M] = (J - I) / (n - 1). Odd n: a learner is idle with probability 1 / n, so E[M] = J / n.
        """
        check(0, 0, num_learners)
        if num_learners == 1:
            return 1.0
        k = self.num_partners
        if num_learners % 2:
            return k / (k + 1)
        others = num_learners - 1  # E[M] is -1 / (n - 1) on what sums to zero
        return (k * (k + 1) + 2 * k / others - k * (k - 1) / others**2) / (k + 1) ** 2


@dataclass(frozen=True, init=False)
class Matching(Topology):
    """A given list of rounds of pairs, used cyclically; partners take the mean of their weights.

    As in MATCHA (Wang et al. 2019), which decomposes a graph into matchings; here they follow each other in order. A
    learner that is in no pair of a round is idle. ValueError if there are no rounds, or a learner is twice in a round,
    its own partner, negative, or too large for the number of learners.
    """

    rounds_of_pairs: tuple[tuple[tuple[int, int], ...], ...]
    _partners: tuple[dict[int, int], ...] = field(repr=False, compare=False)
    _last: int = field(repr=False, compare=False)  # the largest learner in a pair

    def __init__(self, rounds_of_pairs: Iterable[Iterable[tuple[int, int]]]) -> None:
        given = tuple(tuple((int(left), int(right)) for left, right in pairs) for pairs in rounds_of_pairs)
        if not given:
            raise ValueError("Matching: there are no rounds, give at least one list of pairs")
        for step, pairs in enumerate(given):
            for rank, times in Counter(chain.from_iterable(pairs)).items():
                if rank < 0:
                    raise ValueError(f"Matching: round {step} names learner {rank}: count them from 0")
                if times > 1:
                    text = f"Matching: learner {rank} is twice in round {step}, it can have one partner"
                    raise ValueError(f"{text}: move a pair to another round")
        partners = tuple(dict(chain(pairs, ((right, left) for left, right in pairs))) for pairs in given)
        last = max(chain.from_iterable(partners), default=0)
        vars(self).update(rounds_of_pairs=given, _partners=partners, _last=last)

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """The partner in this round, with weights 1/2, or none."""
        check(step, rank, num_learners)
        if self._last >= num_learners:
            text = f"Matching: a round names learner {self._last} and there are {num_learners}"
            raise ValueError(f"{text}: leave the pair out, or take more learners")
        return _with_partners(rank, (self._partners[step % len(self._partners)].get(rank, rank),))

    def period(self, num_learners: int) -> int:
        """The number of rounds."""
        return len(self._partners)


def _with_partners(rank: int, partners: Sequence[int]) -> Round:
    """All have the same weight; what is drawn twice has twice the weight, and an idle draw is the learner itself."""
    weight, times = 1 / (len(partners) + 1), Counter(partners)
    own = (1 + times.pop(rank, 0)) * weight
    others = tuple(sorted(times))
    return Round(own, others, tuple(times[other] * weight for other in others), others)


@lru_cache(maxsize=16)  # all virtual learners and the matrix use the same few steps
def random_matching(seed: int, step: int, num_learners: int, draw: int = 0) -> tuple[int, ...]:
    """The partner of each learner, itself if idle: adjacent learners of a random order are pairs.

    ``draw`` numbers the matchings of a step. The order sorts raw Philox bits, which NumPy keeps across versions and
    machines. The streams of its samplers (permutation, shuffle) may change, and such ranks would average wrongly.
    """
    key = (step, draw) if draw else (step,)
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)).random_raw(num_learners)
    order = np.argsort(bits, kind="stable")
    paired = num_learners - num_learners % 2  # if the number is odd, the last is idle
    left, right = order[0:paired:2], order[1:paired:2]
    partner = np.arange(num_learners)
    partner[left], partner[right] = right, left
    return tuple(partner.tolist())
