"""Topologies of one formula for many numbers of learners: complete, ring, star, torus, hypercube, exponential."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ddpcore.topology.base import Topology, check
from ddpcore.topology.rounds import Round, uniform


class Static(Topology):
    """Every step is alike."""

    def period(self, num_learners: int) -> int:
        """1: every step is alike."""
        return 1


@dataclass(frozen=True)
class Complete(Static):
    """Everyone averages with everyone: W = J / n, the mean in one step at the cost of n - 1 messages."""

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """All other learners, weights 1 / n."""
        check(step, rank, num_learners)
        others = (*range(rank), *range(rank + 1, num_learners))
        weight = 1 / num_learners
        return Round(weight, others, (weight,) * len(others), others)

    def translations(self, num_learners: int) -> tuple[int, ...]:
        """A cycle, as good as any order."""
        return (num_learners,)

    def validate(self, num_learners: int, *, push_sum: bool = False) -> None:
        """Nothing to look for in n^2 edges that are all alike."""
        check(0, 0, num_learners)


@dataclass(frozen=True)
class Ring(Static):
    """Each learner averages with its neighbours on a ring, uniformly (Lian et al. 2017).

    One neighbour each side works for any number of learners; k > 1 needs at least 2k + 1, else ValueError.
    """

    neighbors_each_side: int = 1

    def __post_init__(self) -> None:
        if self.neighbors_each_side < 1:
            raise ValueError(f"Ring: neighbors_each_side is {self.neighbors_each_side}, it must be at least 1")

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """The neighbours, weights 1 / (number of neighbours + 1)."""
        check(step, rank, num_learners)
        side = self.neighbors_each_side
        smallest = 2 * side + 1
        if side > 1 and num_learners < smallest:
            raise ValueError(
                f"Ring: {side} neighbours each side need at least {smallest} learners, there are {num_learners}: "
                "take more learners or fewer neighbours"
            )
        return _both_ways(_around(rank, hop, num_learners) for hop in range(-side, side + 1) if hop % num_learners)

    def translations(self, num_learners: int) -> tuple[int, ...]:
        """The ring itself."""
        return (num_learners,)


@dataclass(frozen=True)
class Star(Static):
    """Learner 0 is everyone's neighbour and the others' only one; Metropolis-Hastings weights, all of them 1 / n.

    Xiao, Boyd and Kim 2007, "Distributed average consensus with least-mean-square deviation". Uniform weights would not
    do: the centre would give 1 / n and get 1 / 2 from each, so that columns are off one and the mean drifts.
    """

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """The centre reads everyone, everyone reads the centre."""
        check(step, rank, num_learners)
        neighbors = (0,) if rank else tuple(range(1, num_learners))
        weight = 1 / num_learners
        own = (num_learners - len(neighbors)) / num_learners
        return Round(own, neighbors, (weight,) * len(neighbors), neighbors)


@dataclass(frozen=True)
class Torus2D(Static):
    """A grid that is wrapped around both ways: four neighbours, fewer where a side has length 2, averaged uniformly.

    `num_rows` times the number of columns is the number of learners, both at least 2 (or 1 for one learner), else
    ValueError. 0 rows: as nearly square as the number allows, with no more rows than columns.
    """

    num_rows: int = 0

    def __post_init__(self) -> None:
        if self.num_rows < 0:
            raise ValueError(f"Torus2D: num_rows is {self.num_rows}, it must be at least 0")

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """The neighbours above, below, left and right, weights 1 / (number of neighbours + 1)."""
        check(step, rank, num_learners)
        num_rows, num_columns = self.translations(num_learners)
        row, column = divmod(rank, num_columns)
        vertical = {_around(row, hop, num_rows) * num_columns + column for hop in (-1, 1)}
        horizontal = {row * num_columns + _around(column, hop, num_columns) for hop in (-1, 1)}
        return _both_ways((vertical | horizontal) - {rank})

    def translations(self, num_learners: int) -> tuple[int, int]:
        """The grid, rows and columns."""
        num_rows = self.num_rows or next(
            divisor for divisor in range(math.isqrt(num_learners), 0, -1) if num_learners % divisor == 0
        )
        num_columns, rest = divmod(num_learners, num_rows)
        if rest or (min(num_rows, num_columns) == 1 and num_learners > 1):
            rows = f"{self.num_rows} rows" if self.num_rows else "rows"
            raise ValueError(
                f"Torus2D: {num_learners} learners are no grid of {rows} and columns, at least 2 of each: "
                "take a number that has such factors, or Ring"
            )
        return num_rows, num_columns


@dataclass(frozen=True)
class Hypercube(Static):
    """Neighbours differ in one bit of their number; log2 n of them, averaged uniformly.

    ValueError unless the number of learners is a power of two. A neighbour a step, in turn, is `OnePeerExponential`'s
    way of having one message a step.
    """

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """The learners one bit away, weights 1 / (log2 n + 1)."""
        check(step, rank, num_learners)
        num_bits = sum(length > 1 for length in self.translations(num_learners))
        return _both_ways(rank ^ (1 << bit) for bit in range(num_bits))

    def translations(self, num_learners: int) -> tuple[int, ...]:
        """The cube, two a side."""
        num_bits = (num_learners - 1).bit_length()
        if num_learners != 1 << num_bits:
            raise ValueError(
                f"Hypercube: {num_learners} learners are no power of two: take {1 << num_bits}, or StaticExponential"
            )
        return (2,) * num_bits or (1,)


@dataclass(frozen=True)
class StaticExponential(Static):
    """Everyone reads from the learners 1, 2, 4, ... below n behind it: T = ceil(log2 n) of them, weights 1 / (T + 1).

    Ying et al. 2021, "Exponential Graph is Provably Efficient", equation 5: the gap is 2 / (T + 1) for even n, at least
    that for odd n. Directed, and doubly stochastic all the same.
    """

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """T sources behind and T destinations ahead."""
        check(step, rank, num_learners)
        hops = [1 << power for power in range(_num_powers(num_learners))]
        return uniform(
            (_around(rank, -hop, num_learners) for hop in hops), (_around(rank, hop, num_learners) for hop in hops)
        )

    def translations(self, num_learners: int) -> tuple[int, ...]:
        """A cycle."""
        return (num_learners,)


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """At step t everyone reads from the learner 2^(t mod T) behind it, T = ceil(log2 n); weights 1/2.

    One message each way a step. For n a power of two, T steps give the exact mean; other n get close to it.
    Assran et al. 2019, "Stochastic Gradient Push"; Ying et al. 2021, "Exponential Graph is Provably Efficient".
    """

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """One source and one destination, the hop of the step away."""
        check(step, rank, num_learners)
        if num_learners == 1:
            return uniform((), ())
        hop = 1 << (step % self.period(num_learners))
        return uniform([_around(rank, -hop, num_learners)], [_around(rank, hop, num_learners)])

    def period(self, num_learners: int) -> int:
        """ceil(log2 n), at least 1."""
        return max(1, _num_powers(num_learners))

    def translations(self, num_learners: int) -> tuple[int, ...]:
        """A cycle."""
        return (num_learners,)


def _around(place: int, hop: int, length: int) -> int:
    return (place + hop) % length


def _num_powers(num_learners: int) -> int:
    """ceil(log2 n), the powers of two below n; in integers, since a float logarithm is wrong near powers."""
    return (num_learners - 1).bit_length()


def _both_ways(neighbors: Iterable[int]) -> Round:
    """The uniform round with neighbours that read back; a set, since both ways round may lead to the same one."""
    each = set(neighbors)
    return uniform(each, each)
