"""Who averages with whom at a step, as pure data: no tensors, no communication, no state.

A topology answers one question, `round(step, rank, num_learners)`: whose weights does this learner read, and how much
does each count? Seen together, the rounds of a step are the mixing matrix W of decentralized SGD (Lian et al. 2017,
Algorithm 1), with W[j, k] the weight that learner j gives to learner k. W is doubly stochastic: rows sum to one, so a
learner holds an average; columns sum to one, so averaging never moves the mean over learners.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

_TOLERANCE = 1e-6  # of row and column sums: matrices written by hand or kept in float32 pass, wrong ones do not
_RANDOM_STEPS_CHECKED = 16  # a random topology has no period to check in full


@dataclass(frozen=True)
class Round:
    """What one learner does at one step: w <- self_weight * w + sum of weights[i] * (w of sources[i])."""

    self_weight: float
    sources: tuple[int, ...]  # learners it reads from, ascending, never itself
    weights: tuple[float, ...]  # weight of each source
    destinations: tuple[int, ...]  # learners that read from it, ascending, never itself


class Topology(ABC):
    """An immutable value, compared by its fields, that fits any number of learners (FromMatrix: one number)."""

    @abstractmethod
    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """What learner `rank` does at `step`, both counted from 0; the cost is linear in the degree.

        Any rank can ask for any step of any rank, in any order. ValueError if the rank or the number is impossible.
        """

    @abstractmethod
    def period(self, num_learners: int) -> int | None:
        """Steps after which the rounds repeat; None for a random topology."""

    def expected_square(self, num_learners: int) -> Matrix:
        """E[W^T W], float64 [num_learners, num_learners], in closed form; only a random topology defines it."""
        raise NotImplementedError(f"{type(self).__name__} repeats: use matrix(step, num_learners) over its period")

    def matrix(self, step: int, num_learners: int) -> Matrix:
        """The mixing matrix W of a step, float64 [num_learners, num_learners]; W[j, k] = weight that j gives to k."""
        _check(step, 0, num_learners)
        mixing = np.zeros((num_learners, num_learners))
        for rank in range(num_learners):
            turn = self.round(step, rank, num_learners)
            mixing[rank, rank] = turn.self_weight
            mixing[rank, list(turn.sources)] = turn.weights
        return mixing

    def spectral_gap(self, num_learners: int) -> float:
        """How fast learners agree, in [0, 1]: 0 never (some difference survives), 1 at once. 1.0 for one learner.

        With a period T: 1 - sigma_2(W_{T-1} ... W_0)^(1/T), sigma_2 the second singular value: each step shrinks the
        distance from the mean by 1 - gap, on average over a period. Random: 1 - lambda_2(E[W^T W]): each step shrinks
        the expected *squared* distance by 1 - gap (Boyd et al. 2006, "Randomized gossip algorithms").
        """
        _check(0, 0, num_learners)
        if num_learners == 1:
            return 1.0
        period = self.period(num_learners)
        if period is None:
            deviation = self.expected_square(num_learners) - 1 / num_learners
            return min(1.0, 1.0 - float(np.linalg.eigvalsh(deviation)[-1]))
        product = np.eye(num_learners)
        for step in range(period):
            product = self.matrix(step, num_learners) @ product
        # Taking the mean out leaves sigma_2 as the largest singular value. The T-th root would blow rounding up.
        sigma = float(np.linalg.norm(product - 1 / num_learners, 2))
        rounding = num_learners * float(np.finfo(np.float64).eps)
        return 1.0 if sigma <= rounding else max(0.0, 1.0 - sigma ** (1 / period))

    def validate(self, num_learners: int) -> None:
        """ValueError unless every step is a sound exchange and every learner hears of every other in time.

        Checked over a period: weights are non-negative, rows and columns of W sum to one, j reads from i exactly if i
        sends to j, and the union of the edges connects all learners. A random topology has no period: the first 16
        steps are checked, and connected means by the union of all pairs that may ever meet.
        """
        _check(0, 0, num_learners)
        period = self.period(num_learners)
        reach = np.eye(num_learners, dtype=np.bool_)
        for step in range(_RANDOM_STEPS_CHECKED if period is None else period):
            self._validate_exchange(step, num_learners)
            reach |= self._validate_weights(step, num_learners) > 0
        if period is None:
            reach |= self.expected_square(num_learners) > 0
        if not (_reaches_all(reach) and _reaches_all(reach.T)):
            raise ValueError(f"{type(self).__name__} of {num_learners} learners is not connected: join its parts")

    def _validate_weights(self, step: int, num_learners: int) -> Matrix:
        mixing = self.matrix(step, num_learners)
        if not (mixing >= 0).all():  # NaN fails too
            raise ValueError(f"{type(self).__name__} has a negative or NaN weight: each weight must be at least 0")
        for axis, line in ((1, "row"), (0, "column")):
            sums = mixing.sum(axis=axis)
            worst = int(np.abs(sums - 1).argmax())
            if abs(sums[worst] - 1) > _TOLERANCE:
                raise ValueError(f"{type(self).__name__}: {line} {worst} sums to {sums[worst]:.6g}, make it sum to 1")
        return mixing

    def _validate_exchange(self, step: int, num_learners: int) -> None:
        name = type(self).__name__
        rounds = [self.round(step, rank, num_learners) for rank in range(num_learners)]
        readers: list[list[int]] = [[] for _ in range(num_learners)]
        for rank, turn in enumerate(rounds):
            if len(turn.sources) != len(turn.weights) or list(turn.sources) != sorted(set(turn.sources) - {rank}):
                raise ValueError(f"{name}: sources of learner {rank} must ascend without itself, with a weight each")
            for source in turn.sources:
                if not 0 <= source < num_learners:
                    raise ValueError(f"{name}: learner {rank} reads from {source}, which must be below {num_learners}")
                readers[source].append(rank)
        for rank, turn in enumerate(rounds):
            if turn.destinations != tuple(readers[rank]):
                told = f"learner {rank} sends to {turn.destinations} but {tuple(readers[rank])} read from it"
                raise ValueError(f"{name}: {told} at step {step}, make them agree")


@dataclass(frozen=True)
class Complete(Topology):
    """Everyone averages with everyone: W = J / n, the mean in one step at the cost of n - 1 messages."""

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """All other learners, weights 1 / n."""
        _check(step, rank, num_learners)
        others = [other for other in range(num_learners) if other != rank]
        return _uniform(others, others)

    def period(self, num_learners: int) -> int:
        """1: every step is alike."""
        return 1


@dataclass(frozen=True)
class Ring(Topology):
    """Each learner averages with its neighbours on a ring, uniformly (Lian et al. 2017).

    One neighbour each side works for any number of learners; k > 1 needs at least 2k + 1, else ValueError.
    """

    neighbors_each_side: int = 1

    def __post_init__(self) -> None:
        if self.neighbors_each_side < 1:
            raise ValueError(f"Ring: neighbors_each_side is {self.neighbors_each_side}, it must be at least 1")

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """The neighbours, weights 1 / (number of neighbours + 1)."""
        _check(step, rank, num_learners)
        side = self.neighbors_each_side
        smallest = 2 * side + 1
        if side > 1 and num_learners < smallest:
            raise ValueError(
                f"Ring: {side} neighbours each side need at least {smallest} learners, there are {num_learners}: "
                "take more learners or fewer neighbours"
            )
        hops = (hop for hop in range(-side, side + 1) if hop % num_learners)
        neighbors = {(rank + hop) % num_learners for hop in hops}  # a set: both sides are one neighbour when n = 2
        return _uniform(neighbors, neighbors)

    def period(self, num_learners: int) -> int:
        """1: every step is alike."""
        return 1


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
        _check(step, rank, num_learners)
        partner = _matching(self.seed, step, num_learners)[rank]
        partners = () if partner == rank else (partner,)
        return _uniform(partners, partners)

    def period(self, num_learners: int) -> None:
        """None: no step repeats."""

    def expected_square(self, num_learners: int) -> Matrix:
        """(I + E[M]) / 2 with M the matching's permutation matrix: W = (I + M) / 2 is a projection, so W^T W = W.

        Even n: E[M] = (J - I) / (n - 1), gap n / (2n - 2). Odd n: also idle with probability 1 / n, so J / n, gap 1/2.
        """
        _check(0, 0, num_learners)
        identity, ones = np.eye(num_learners), np.ones((num_learners, num_learners))
        expected = ones / num_learners if num_learners % 2 else (ones - identity) / (num_learners - 1)
        return (identity + expected) / 2


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """At step t everyone reads from the learner 2^(t mod T) behind it, T = ceil(log2 n); weights 1/2.

    One message each way a step. For n a power of two, T steps give the exact mean; other n get close to it.
    Assran et al. 2019, "Stochastic Gradient Push"; Ying et al. 2021, "Exponential Graph is Provably Efficient".
    """

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """One source and one destination, the hop of the step away."""
        _check(step, rank, num_learners)
        if num_learners == 1:
            return _uniform((), ())
        hop = 1 << (step % self.period(num_learners))
        return _uniform([(rank - hop) % num_learners], [(rank + hop) % num_learners])

    def period(self, num_learners: int) -> int:
        """ceil(log2 n), at least 1; in integers, since a float logarithm is wrong near powers of two."""
        return max(1, (num_learners - 1).bit_length())


@dataclass(frozen=True, init=False)
class FromMatrix(Topology):
    """The same mixing matrix at every step, given as anything numpy reads as [n, n].

    ValueError unless it is square, finite, non-negative, doubly stochastic (within 1e-6) and connected, or when used
    with another number of learners than n. Connected is not yet averaging (a plain swap never is): see `spectral_gap`.
    """

    rows: tuple[tuple[float, ...], ...] = field(repr=False)
    _rounds: tuple[Round, ...] = field(repr=False, compare=False)

    def __init__(self, matrix: npt.ArrayLike) -> None:
        mixing = np.asarray(matrix, dtype=np.float64)
        if mixing.ndim != 2 or mixing.shape[0] != mixing.shape[1] or mixing.size == 0:
            raise ValueError(f"FromMatrix: the matrix has shape {list(mixing.shape)}, it must be square, [n, n]")
        if not np.isfinite(mixing).all():
            raise ValueError("FromMatrix: the matrix holds NaN or infinity, each weight must be a finite number")
        num_learners = len(mixing)
        edges = (mixing != 0) & ~np.eye(num_learners, dtype=np.bool_)
        rounds = []
        for rank in range(num_learners):
            sources, destinations = np.flatnonzero(edges[rank]), np.flatnonzero(edges[:, rank])
            weights = mixing[rank, sources]
            rounds.append(
                Round(float(mixing[rank, rank]), *(tuple(a.tolist()) for a in (sources, weights, destinations)))
            )
        object.__setattr__(self, "rows", tuple(map(tuple, mixing.tolist())))
        object.__setattr__(self, "_rounds", tuple(rounds))
        self.validate(num_learners)

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """The row and the column of `rank`, without zeros."""
        _check(step, rank, num_learners)
        if num_learners != len(self.rows):
            raise ValueError(
                f"FromMatrix: a matrix for {len(self.rows)} learners cannot serve {num_learners}: give one of that size"
            )
        return self._rounds[rank]

    def period(self, num_learners: int) -> int:
        """1: every step is alike."""
        return 1


_BUILDERS: dict[str, Callable[[int], Topology]] = {
    "complete": lambda seed: Complete(),
    "ring": lambda seed: Ring(),
    "random_pair": lambda seed: RandomPair(seed),
    "one_peer_exponential": lambda seed: OnePeerExponential(),
}


def names() -> tuple[str, ...]:
    """The names `build` knows."""
    return tuple(_BUILDERS)


def build(name: str, seed: int = 0) -> Topology:
    """The topology of a name; the seed matters to random ones only. ValueError lists the names."""
    if name not in _BUILDERS:
        raise ValueError(f"unknown topology '{name}': choose one of {', '.join(names())}")
    return _BUILDERS[name](seed)


def _check(step: int, rank: int, num_learners: int) -> None:
    if num_learners < 1:
        raise ValueError(f"num_learners is {num_learners}, it must be at least 1")
    if not 0 <= rank < num_learners:
        raise ValueError(f"rank is {rank}, it must be from 0 to {num_learners - 1} with {num_learners} learners")
    if step < 0:
        raise ValueError(f"step is {step}, it must be at least 0")


def _uniform(sources: Iterable[int], destinations: Iterable[int]) -> Round:
    ordered = tuple(sorted(sources))
    weight = 1 / (len(ordered) + 1)
    return Round(weight, ordered, (weight,) * len(ordered), tuple(sorted(destinations)))


def _reaches_all(edges: npt.NDArray[np.bool_]) -> bool:
    """Whether learner 0 reaches everyone along the edges [n, n]."""
    seen = np.zeros(len(edges), dtype=np.bool_)
    frontier = seen.copy()
    frontier[0] = True
    while frontier.any():
        seen |= frontier
        frontier = edges[frontier].any(axis=0) & ~seen
    return bool(seen.all())


@lru_cache(maxsize=16)  # every rank of a virtual world, and the matrix, ask for the same few steps
def _matching(seed: int, step: int, num_learners: int) -> tuple[int, ...]:
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
