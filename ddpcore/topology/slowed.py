"""A topology that goes on to its next round after several steps."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from ddpcore.options.typed import check_range
from ddpcore.topology.base import Matrix, Topology
from ddpcore.topology.rounds import Round


@dataclass(frozen=True)
class Slowed(Topology):
    """``W(t)`` is that of step ``t // steps`` of another topology, for learners that average every so many steps.

    Args:
        topology: the other one.
        steps: at least 1.
    """

    topology: Topology
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
    def translations(self, num_learners: int) -> tuple[int, ...] | None:
        return self.topology.translations(num_learners)

    @override
    def expected_square(self, num_learners: int) -> Matrix:
        return self.topology.expected_square(num_learners)
