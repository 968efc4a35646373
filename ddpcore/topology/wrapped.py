"""Topologies that change another one: the share of its averages, or how often it goes on to the next round."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from ddpcore.options.typed import check_range
from ddpcore.topology.base import Matrix, Topology
from ddpcore.topology.rounds import Round


@dataclass(frozen=True)
class _Wrapped(Topology):
    """With the period and the grid of another topology."""

    topology: Topology

    @override
    def period(self, num_learners: int) -> int | None:
        return self.topology.period(num_learners)

    @override
    def translations(self, num_learners: int) -> tuple[int, ...] | None:
        return self.topology.translations(num_learners)


@dataclass(frozen=True)
class Damped(_Wrapped):
    """``(1 - c) I + c W``: a learner keeps the share 1 - c of its weights, and averages the rest.

    With c = 1/2 every eigenvalue of a symmetric W moves from [-1, 1] to [0, 1].

    Args:
        topology: W.
        share: c, from 0 to 1.
    """

    share: float

    def __post_init__(self) -> None:
        check_range("Damped: share", self.share, least=0, most=1)

    @override
    def round(self, step: int, rank: int, num_learners: int) -> Round:
        whole = self.topology.round(step, rank, num_learners)
        weights = tuple(self.share * weight for weight in whole.weights)
        return Round(1 - self.share + self.share * whole.self_weight, whole.sources, weights, whole.destinations)


@dataclass(frozen=True)
class Slowed(_Wrapped):
    """``W(t)`` is the matrix of step ``t // steps`` of another topology, for learners that average every so many steps.

    Args:
        topology: the other one.
        steps: at least 1.
    """

    steps: int

    def __post_init__(self) -> None:
        check_range("Slowed: steps", self.steps, least=1)

    @override
    def round(self, step: int, rank: int, num_learners: int) -> Round:
        return self.topology.round(step // self.steps, rank, num_learners)

    @override
    def period(self, num_learners: int) -> int | None:
        period = self.topology.period(num_learners)
        return period if period in (None, 1) else period * self.steps

    @override
    def expected_square(self, num_learners: int) -> Matrix:
        return self.topology.expected_square(num_learners)
