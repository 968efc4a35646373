"""Which rank is slow. Ranks that wait for each other have equal steps, so the time of a step names nobody."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median_low
from typing import NamedTuple

PHASES = ("forward pass", "backward pass", "rest of the step")
LEAST_WAITING, LEAST_EXPLAINED = 0.1, 0.8  # of a step, and of the waiting


class SlowRank(NamedTuple):
    """A rank for which the others wait, with seconds of a step."""

    rank: int
    phase: str  # one of PHASES: where it loses most
    excess: float  # own work beyond the median rank's
    waiting: float  # of the others, on average
    seconds: float  # in all

    def __str__(self) -> str:
        excess, waiting, seconds = (f"{1e3 * one:.3g}" for one in self[2:])
        return (
            f"rank {self.rank} is slow in the {self.phase}: {excess} ms a step more than the median rank; the others "
            f"wait {waiting} of {seconds} ms"
        )


def slow_ranks(own: Mapping[int, tuple[float, ...]], waiting: Mapping[int, float]) -> list[SlowRank]:
    """The ranks that explain at least 80 % of the others' waiting; none if these wait less than 10 % of a step.

    Args:
        own: of each rank, seconds a step of its own work by phase, in the order of ``PHASES``.
        waiting: of each rank, seconds a step in which it only waited.
    """
    sums = {rank: sum(phases) for rank, phases in own.items()}
    middle, middles = median_low(sums.values()), [median_low(column) for column in zip(*own.values(), strict=True)]
    mean = fmean(waiting[rank] for rank in own if sums[rank] <= middle)
    seconds, found = fmean(sums[rank] + waiting[rank] for rank in own), []
    for rank, total in sums.items():
        if mean >= LEAST_WAITING * seconds and total - middle >= LEAST_EXPLAINED * mean:
            lost = [mine - usual for mine, usual in zip(own[rank], middles, strict=True)]
            found.append(SlowRank(rank, PHASES[lost.index(max(lost))], total - middle, mean, seconds))
    return found
