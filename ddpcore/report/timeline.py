"""Who waits for whom: sections of the page from the recorded steps of a run's ranks.

Shapes: R ranks, T steps that all ranks recorded.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ddpcore.display.chart import Chart, Series, finite
from ddpcore.distributed.phases import slow_ranks
from ddpcore.report.section import Section, TableData
from ddpcore.report.sources import Run

_PARTS = {
    "compute": "compute",
    "overlapped": "hidden averaging, at most",
    "exposed": "exposed averaging",
    "seconds": "whole step",
}


def timed_steps(run: Run) -> dict[int, dict[int, dict[str, Any]]]:
    """By rank, then by step: the recorded lines that have times."""
    found = {
        rank: {line["step"]: line for line in lines if finite(line.get("compute")) is not None}
        for rank, lines in run.steps.items()
    }
    return {rank: lines for rank, lines in found.items() if lines}


def timeline_sections(run: Run, name: str) -> list[Section]:
    """The section of a run; none if fewer than two ranks have recorded their steps: one rank waits for nobody."""
    found = timed_steps(run)
    if len(found) < 2:
        return []
    steps = sorted(set.intersection(*(set(lines) for lines in found.values())))
    ranks = list(found)
    headings = ["rank", *(f"{title}, ms" for title in _PARTS.values())]
    rows = [[str(rank), *(_mean(found[rank], steps, key) for key in _PARTS)] for rank in ranks]
    tables = [TableData(title=f"Mean of {len(steps):,} steps", headings=headings, rows=rows)]
    waits = _waits(found, steps)
    if waits is not None:
        tables.append(waits)
    lines = [*_named(found, steps), *_sentences(found, steps)] if steps else []
    charts = [
        _heat(found, steps, "exposed", "Exposed averaging of each rank at each step"),
        _heat(found, steps, "compute", "Compute of each rank at each step"),
    ]
    title = f"Who waits for whom: {name}"
    return [Section(title=title, lines=lines, tables=tables, charts=charts if steps else [])]


def _mean(lines: Mapping[int, dict[str, Any]], steps: Sequence[int], key: str) -> str:
    values = [value for step in steps if (value := finite(lines[step].get(key))) is not None]
    return f"{1e3 * statistics.fmean(values):.3g}" if values else "-"


def _heat(found: Mapping[int, Any], steps: Sequence[int], key: str, title: str) -> Chart:
    series = []
    for rank, lines in found.items():
        seconds = [finite(lines[step].get(key)) for step in steps]
        series.append(Series(name=f"rank {rank}", x=steps, y=[None if s is None else 1e3 * s for s in seconds]))
    return Chart(title=title, kind="heat", x_label="step", y_label="ms", series=series)


def _waits(found: Mapping[int, Any], steps: Sequence[int]) -> TableData | None:
    """For each rank, how long it waited for each other rank, summed over the steps."""
    ranks = list(found)
    numbers = {str(rank): rank for rank in ranks}
    total = {rank: dict.fromkeys(ranks, 0.0) for rank in ranks}
    for rank, lines in found.items():
        for step in steps:
            waits = lines[step].get("waits")
            for other, seconds in waits.items() if isinstance(waits, dict) else ():
                if other in numbers and finite(seconds) is not None:
                    total[rank][numbers[other]] += seconds
    if not any(any(row.values()) for row in total.values()):
        return None
    rows = [[f"rank {rank}", *(f"{1e3 * total[rank][other]:,.1f}" for other in ranks)] for rank in ranks]
    headings = ["waits for, ms in all", *(f"rank {rank}" for rank in ranks)]
    return TableData(title="Time that the rank of a row waited for the rank of a column", headings=headings, rows=rows)


def _named(found: Mapping[int, Any], steps: Sequence[int]) -> list[str]:
    """A sentence for each rank for which the others wait."""
    means = {
        key: {
            rank: statistics.fmean(finite(lines[step].get(key)) or 0.0 for step in steps)
            for rank, lines in found.items()
        }
        for key in ("forward", "backward", "compute", "exposed")
    }
    own = {
        rank: (forward, backward := means["backward"][rank], means["compute"][rank] - forward - backward)
        for rank, forward in means["forward"].items()
    }
    return [f"{str(one).capitalize()}." for one in slow_ranks(own, means["exposed"])]


def _sentences(found: Mapping[int, Any], steps: Sequence[int]) -> list[str]:
    slowest, saved, total = what_if(
        {rank: [float(lines[step]["compute"]) for step in steps] for rank, lines in found.items()},
        {rank: [finite(lines[step].get("seconds")) or 0.0 for step in steps] for rank, lines in found.items()},
    )
    share = f" ({100 * saved / total:.1f} %)" if total else ""
    return [
        f"Slowest rank: {slowest}, by the sum of its compute.",
        f"If its compute were at most the median of the ranks at each step, and if each step lasts as long as its "
        f"slowest rank computes, the {len(steps):,} steps would take {saved:.3g} s{share} less than {total:.3g} s.",
    ]


def what_if(compute: Mapping[int, Sequence[float]], seconds: Mapping[int, Sequence[float]]) -> tuple[int, float, float]:
    """The rank with the most compute, the seconds saved if it were as fast as the median, and the seconds in all.

    Args:
        compute: of each rank, seconds of compute at each step.
        seconds: of each rank, seconds of each whole step.
    """
    slowest = max(compute, key=lambda rank: sum(compute[rank]))
    saved = 0.0
    for at_step in zip(*compute.values(), strict=True):
        middle = statistics.median(at_step)
        values = dict(zip(compute, at_step, strict=True))
        values[slowest] = min(values[slowest], middle)
        saved += max(at_step) - max(values.values())
    return slowest, saved, max(map(sum, seconds.values()))
