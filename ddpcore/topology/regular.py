"""Topologies with a formula for n learners: complete, ring, star, torus, hypercube, exponential."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ddpcore.options.typed import check_range, typed
from ddpcore.topology.base import Topology, check
from ddpcore.topology.rounds import Round, uniform


class Static(Topology):
    """A topology with the same rounds at every step."""

    def period(self, num_learners: int) -> int:
        """1: all steps have the same rounds."""
        return 1


class Cyclic(Topology):
    """A topology in which all learners do the same, along one cycle."""

    def translations(self, num_learners: int) -> tuple[int, ...]:
        """The cycle."""
        return (num_learners,)


@dataclass(frozen=True)
class Complete(Static, Cyclic):
    """All learners average with all: W = J / n. One step gives the mean, at the cost of n - 1 messages a learner."""

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """All other learners, with weights 1 / n."""
        check(step, rank, num_learners)
        return _both_ways(other for other in range(num_learners) if other != rank)

    def validate(self, num_learners: int, *, push_sum: bool = False) -> None:
        """Correct by construction: it would cost n^2 to check."""
        check(0, 0, num_learners)


@dataclass(frozen=True)
class Ring(Static, Cyclic):
    """Each learner averages with its neighbours on a ring (Lian et al. 2017).

    ValueError: an argument is out of its range, or there are too few learners.
    """

    neighbors_each_side: int = 1  #: k. More than one need at least 2k + 1 learners; one fits any number.
    #: s, the share of a learner's own weights, from 0 to below 1; the neighbours share the rest equally. None is the
    #: mean, 1 / (number of neighbours + 1). With k = 1 and an even number of learners, the smallest eigenvalue of W is
    #: 2s - 1.
    self_weight: float | None = None

    def __post_init__(self) -> None:
        check_range("Ring: neighbors_each_side", self.neighbors_each_side, least=1)
        if self.self_weight is not None:
            check_range("Ring: self_weight", typed("Ring: self_weight", self.self_weight, float), least=0, below=1)

    def __repr__(self) -> str:
        share = "" if self.self_weight is None else f", self_weight={self.self_weight}"
        return f"Ring(neighbors_each_side={self.neighbors_each_side}{share})"

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """The neighbours, with equal weights."""
        check(step, rank, num_learners)
        side = self.neighbors_each_side
        smallest = 2 * side + 1
        if side > 1 and num_learners < smallest:
            text = f"Ring: {side} neighbours each side need at least {smallest} learners, there are {num_learners}"
            raise ValueError(f"{text}: take more learners or fewer neighbours")
        mean = _both_ways((rank + hop) % num_learners for hop in range(-side, side + 1) if hop % num_learners)
        if self.self_weight is None or not mean.sources:
            return mean
        weight = (1 - self.self_weight) / len(mean.sources)
        return replace(mean, self_weight=self.self_weight, weights=(weight,) * len(mean.sources))


@dataclass(frozen=True)
class Star(Static):
    """Learner 0 is the only neighbour of all others; Metropolis-Hastings weights, which are 1 / n on every edge.

    Xiao, Boyd and Kim 2007, "Distributed average consensus with least-mean-square deviation". Uniform weights would
    change the mean over learners: the centre would give 1 / n and receive 1 / 2, so columns would not sum to one.
    """

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """The centre reads from all others, and they read from the centre."""
        check(step, rank, num_learners)
        neighbors = (0,) if rank else tuple(range(1, num_learners))
        weight = 1 / num_learners
        return Round((num_learners - len(neighbors)) / num_learners, neighbors, (weight,) * len(neighbors), neighbors)


@dataclass(frozen=True)
class Torus2D(Static):
    """A periodic grid; each learner takes the mean with its four neighbours (fewer if a side has length 2).

    The number of learners must be `num_rows` times a number of columns, both at least 2 (1 for one learner), else
    ValueError. 0 rows: as nearly square as possible, with no more rows than columns.
    """

    num_rows: int = 0

    def __post_init__(self) -> None:
        check_range("Torus2D: num_rows", self.num_rows, least=0)

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """The neighbours above, below, left and right, with weights 1 / (number of neighbours + 1)."""
        check(step, rank, num_learners)
        num_rows, num_columns = self.translations(num_learners)
        row, column = divmod(rank, num_columns)
        vertical = {(row + hop) % num_rows * num_columns + column for hop in (-1, 1)}
        return _both_ways((vertical | {row * num_columns + (column + hop) % num_columns for hop in (-1, 1)}) - {rank})

    def translations(self, num_learners: int) -> tuple[int, int]:
        """(Rows, columns)."""
        divisors = (one for one in range(math.isqrt(num_learners), 0, -1) if num_learners % one == 0)
        num_rows = self.num_rows or next(divisors)
        num_columns, rest = divmod(num_learners, num_rows)
        if rest or (min(num_rows, num_columns) == 1 and num_learners > 1):
            rows = f"{self.num_rows} rows" if self.num_rows else "rows"
            what = f"Torus2D: {num_learners} learners are no grid of {rows} and columns, at least 2 of each"
            raise ValueError(f"{what}: take a number that has such factors, or Ring")
        return num_rows, num_columns


@dataclass(frozen=True)
class Hypercube(Static):
    """Each learner takes the mean with the log2 n learners whose rank differs in one bit.

    ValueError unless the number of learners is a power of two. `OnePeerExponential` has one message at a step instead.
    """

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """The learners whose rank differs in one bit, with weights 1 / (log2 n + 1)."""
        check(step, rank, num_learners)
        num_bits = sum(length > 1 for length in self.translations(num_learners))
        return _both_ways(rank ^ (1 << bit) for bit in range(num_bits))

    def translations(self, num_learners: int) -> tuple[int, ...]:
        """log2 n dimensions of length 2."""
        num_bits = (num_learners - 1).bit_length()
        if num_learners != 1 << num_bits:
            what = f"Hypercube: {num_learners} learners are no power of two"
            raise ValueError(f"{what}: take {1 << num_bits}, or StaticExponential")
        return (2,) * num_bits or (1,)


@dataclass(frozen=True)
class StaticExponential(Static, Cyclic):
    """Learner j reads from j - 1, j - 2, j - 4, ... (mod n): T = ceil(log2 n) learners, with weights 1 / (T + 1).

    Ying et al. 2021, "Exponential Graph is Provably Efficient", equation 5: the gap is 2 / (T + 1) for even n, and at
    least that for odd n. The graph is directed, and W is doubly stochastic.
    """

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """T sources with lower ranks and T destinations with higher ranks (mod n)."""
        check(step, rank, num_learners)
        hops = [1 << power for power in range((num_learners - 1).bit_length())]
        return uniform(((rank - hop) % num_learners for hop in hops), ((rank + hop) % num_learners for hop in hops))


@dataclass(frozen=True)
class OnePeerExponential(Cyclic):
    """At step t learner j reads from j - 2^(t mod T) (mod n), T = ceil(log2 n), with weights 1/2.

    Each learner sends and receives one message at a step. If n is a power of two, T steps give the exact mean; for
    other n they come close to it. Assran et al. 2019, "Stochastic Gradient Push"; Ying et al. 2021, "Exponential Graph
    is Provably Efficient".
    """

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """One source and one destination, at the distance of this step."""
        check(step, rank, num_learners)
        if num_learners == 1:
            return uniform((), ())
        hop = 1 << (step % self.period(num_learners))
        return uniform([(rank - hop) % num_learners], [(rank + hop) % num_learners])

    def period(self, num_learners: int) -> int:
        """ceil(log2 n), at least 1."""
        return max(1, (num_learners - 1).bit_length())  # a float logarithm is wrong near powers of two


def _both_ways(neighbors: Iterable[int]) -> Round:
    """The uniform round in which sources are also destinations; a neighbour that occurs twice counts once."""
    each = set(neighbors)
    return uniform(each, each)
