"""Who waits for whom: sections of the page from the recorded steps of a run's ranks.

Shapes: R ranks, T steps that all ranks recorded.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ddpcore.bench.findings import waited_for
from ddpcore.display.chart import Chart, Series, finite
from ddpcore.report.section import Section, TableData
from ddpcore.report.sources import Run

MAX_COLUMNS = 400  # of a heat map
_PARTS = {
    "compute": "compute",
    "overlapped": "hidden averaging, at most",
    "exposed": "exposed averaging",
    "seconds": "whole step",
}
_COUNTS = ("forward", "backward", "compute", "exposed")


def timed_steps(run: Run) -> dict[int, dict[int, dict[str, Any]]]:
    """By rank, then by step: the recorded lines that have times."""
    found = {
        rank: {line["step"]: line for line in lines if finite(line.get("compute")) is not None}
        for rank, lines in run.steps.items()
    }
    return {rank: lines for rank, lines in found.items() if lines}


def timeline_sections(run: Run) -> list[Section]:
    """The section of a run; none if fewer than two ranks have recorded their steps: one rank waits for nobody."""
    found = timed_steps(run)
    if len(found) < 2:
        return []
    steps = sorted(set.intersection(*(set(lines) for lines in found.values())))
    ranks = list(found)
    headings = ["rank", *(f"{title}, ms" for title in _PARTS.values())]
    rows = [[str(rank), *(_mean(found[rank], steps, key) for key in _PARTS)] for rank in ranks]
    tables = [TableData(title=f"Mean of {len(steps):,} steps", headings=headings, rows=rows), *_waits(found, steps)]
    lines, charts = [], []
    if steps:
        lines = _named(found, steps)
        titles = (("exposed", "Exposed averaging"), ("compute", "Compute"))
        charts = [_heat(found, steps, key, f"{title} of each rank at each step") for key, title in titles]
    return [Section(title=f"Who waits for whom: {run.label}", lines=lines, tables=tables, charts=charts)]


def _mean(lines: Mapping[int, dict[str, Any]], steps: Sequence[int], key: str) -> str:
    values = [value for step in steps if (value := finite(lines[step].get(key))) is not None]
    return f"{1e3 * statistics.fmean(values):.3g}" if values else "-"


def _heat(found: Mapping[int, Any], steps: Sequence[int], key: str, title: str) -> Chart:
    size = -(-len(steps) // MAX_COLUMNS) or 1
    starts, series = range(0, len(steps), size), []
    for rank, lines in found.items():
        seconds = [finite(lines[step].get(key)) for step in steps]
        parts = ([1e3 * one for one in seconds[start : start + size] if one is not None] for start in starts)
        y = [max(part, default=None) for part in parts]
        series.append(Series(name=f"rank {rank}", x=[steps[start] for start in starts], y=y))
    note = f"A column is the largest value of {size} steps." if size > 1 else ""
    return Chart(title=title, kind="heat", x_label="step", y_label="ms", series=series, note=note)


def _waits(found: Mapping[int, Any], steps: Sequence[int]) -> list[TableData]:
    """For each rank, how long it waited for each other rank, summed over the steps; no table if nobody waited."""
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
        return []
    rows = [[f"rank {rank}", *(f"{1e3 * total[rank][other]:,.1f}" for other in ranks)] for rank in ranks]
    headings = ["waits for, ms in all", *(f"rank {rank}" for rank in ranks)]
    title = "Time that the rank of a row waited for the rank of a column"
    return [TableData(title=title, headings=headings, rows=rows)]


def _named(found: Mapping[int, Any], steps: Sequence[int]) -> list[str]:
    """A sentence for each rank for which the others wait; none for steps that were recorded without their passes."""
    rows = {rank: [[lines[step].get(key) for key in _COUNTS] for step in steps] for rank, lines in found.items()}
    if any(finite(value) is None for lines in rows.values() for line in lines for value in line):
        return []
    means = {rank: [statistics.fmean(column) for column in zip(*lines, strict=True)] for rank, lines in rows.items()}
    own = {rank: (forward, backward, work - forward - backward) for rank, (forward, backward, work, _) in means.items()}
    return waited_for(own, {rank: mean[3] for rank, mean in means.items()})
