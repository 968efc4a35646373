"""How much of an average learners take, as a function of the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ddpcore.options.typed import check_keys, check_range, typed


@dataclass(frozen=True, kw_only=True)
class AdaptiveConsensus:
    r"""The share c_t of an average in DSGD-AC (2602.02899), which falls with the learning rate a_t.

    ``c_t = (1 - least) (a_t / a_s)^power + least`` from step s = ``start`` on, and 1 before. ``w <- W w`` becomes
    ``w <- (1 - c_t) w + c_t W w``, so learners stay further apart at a small rate than with DPSGD. It is 1 where the
    rate is above a_s. The rate is that of the first parameter group when the exchange starts.

    It rests on the code of the paper's author (github WangZesen/decent-sam-grc); the paper was not read. The defaults
    are those of that code, except its ``start``, the end of the warm-up.

    Args:
        power: p, not negative; 0 is DPSGD.
        least: c at rate 0, from 0 to 1.
        start: s, in steps. The rate must be above 0 there.

    Raises:
        ValueError: a number is out of its range.
    """

    power: float = 3.0
    least: float = 0.0
    start: int = 0

    def __post_init__(self) -> None:
        check_range("consensus: power", typed("consensus: power", self.power, float), least=0)
        check_range("consensus: least", typed("consensus: least", self.least, float), least=0, most=1)
        check_range("consensus: start", typed("consensus: start", self.start, int), least=0)

    def share(self, ratio: float) -> float:
        """c_t for ``a_t / a_s``."""
        return min(1.0, (1 - self.least) * float(ratio**self.power) + self.least)


def consensus_of(wanted: AdaptiveConsensus | Mapping[str, Any] | None) -> AdaptiveConsensus | None:
    """Make the consensus from its settings, such as ``{"power": 3, "start": 500}``.

    Raises:
        ValueError: it has no such setting, or a value is wrong.
    """
    if wanted is None or isinstance(wanted, AdaptiveConsensus):
        return wanted
    if not isinstance(wanted, Mapping):
        raise ValueError(f"dpsgd: consensus is {wanted!r}: it must be a mapping, settings of an AdaptiveConsensus")
    check_keys("dpsgd: consensus", wanted, (item.name for item in fields(AdaptiveConsensus)))
    return AdaptiveConsensus(**wanted)
