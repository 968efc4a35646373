"""The algorithms, one a file, by name: ssgd, dpsgd, local_sgd; and the baselines single and ddp."""

from __future__ import annotations

from ddpcore.topology import Topology

from .base import Baseline, Strategy
from .baselines import DDP, Single
from .dpsgd import DPSGD
from .local_sgd import LocalSGD
from .ssgd import SSGD

__all__ = ["Baseline", "DDP", "DPSGD", "SSGD", "LocalSGD", "Single", "Strategy", "build", "names"]

_ALL: tuple[type[Strategy] | type[Baseline], ...] = (SSGD, DPSGD, LocalSGD, Single, DDP)


def names() -> list[str]:
    """The names that :func:`build` knows."""
    return [cls.name for cls in _ALL]


def build(name: str, *, topology: Topology, period: int = 8) -> Strategy | Baseline:
    """A strategy by name.

    Args:
        name: one of :func:`names`.
        topology: for dpsgd.
        period: for local_sgd, steps between averages.

    Raises:
        ValueError: no such strategy.
    """
    if name == DPSGD.name:
        return DPSGD(topology)
    if name == LocalSGD.name:
        return LocalSGD(period)
    for cls in (SSGD, Single, DDP):
        if name == cls.name:
            return cls()
    raise ValueError(f"unknown strategy {name!r}: choose from {', '.join(names())}")
