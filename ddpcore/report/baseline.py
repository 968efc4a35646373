"""What moved against a baseline by more than its spread: bench rows, rows of studies, and runs with several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpcore.display.chart import finite
from ddpcore.report.groups import Group, grouped
from ddpcore.report.section import Section, TableData
from ddpcore.report.sources import Run, Sources

# Columns of bench rows, or fields of the result, that name a row; and columns with p20, p50 and p80.
_NAMES = ("model", "dataset", "batch_size", "dtype", "backend", "every", "strategy", "topology", "transport", "op",
          "size_bytes", "bucket_mb", "comparison", "list", "implementation", "statistics", "num_buckets",
          "world_size")  # fmt: skip
_QUANTILES = ("step_ms", "ms", "time_us", "measured_ms", "overhead_pct")


@dataclass(frozen=True)
class Measure:
    """A value and its spread; None without a spread, of one seed."""

    middle: float
    low: float | None
    high: float | None


def baseline_section(now: Sources, before: Sources, comparisons: Sequence[Any], others: Sequence[Any]) -> Section:
    """The measures that both have, and which of them moved beyond the spread of both."""
    groups = grouped([*now.runs, *before.runs])
    mine, theirs = ({**_of_benches(one), **_of_runs(groups, one.runs)} for one in (now, before))
    mine |= _of_studies(comparisons)
    theirs |= _of_studies(others)
    shared = [key for key in mine if key in theirs]
    if not shared:
        reason = "The report and the baseline have no measure in common, so nothing is compared: name the same kind "
        advice = (
            "of runs, studies or bench files. Runs of other configs stand on one page: ddpcore report RUNS --by FIELD"
        )
        return Section(title="Against the baseline", problems=[reason + advice])
    rows: list[list[str]] = []
    marks: dict[int, str] = {}
    for key in shared:
        word = verdict(theirs[key], mine[key])
        if word.startswith("moved"):
            marks[len(rows)] = "moved"
        ratio = f"{mine[key].middle / theirs[key].middle:.3g}" if theirs[key].middle else "-"
        rows.append([key, _text(theirs[key]), _text(mine[key]), ratio, word])
    heading = ["measure", "baseline", "now", "ratio", "verdict"]
    lines = [
        f"{len(marks)} of {len(shared)} measures moved beyond the spread of both: p20 to p80 of a bench, the smallest "
        "to the largest seed of a study or of runs.",
        f"{len(mine) - len(shared)} measures are only here, {len(theirs) - len(shared)} only in the baseline.",
    ]
    table = TableData(title="", headings=heading, rows=rows, marks=marks)
    return Section(title="Against the baseline", lines=lines, tables=[table])


def verdict(before: Measure, now: Measure) -> str:
    """``moved up``, ``moved down``, ``within the spread``, or why that is not known."""
    if None in (before.low, before.high, now.low, now.high):
        return "no spread, so no verdict"
    assert before.low is not None and before.high is not None and now.low is not None and now.high is not None
    if now.low > before.high:
        return "moved up"
    if now.high < before.low:
        return "moved down"
    return "within the spread"


def _text(one: Measure) -> str:
    return f"{one.middle:.4g}" + ("" if one.low is None else f" [{one.low:.4g}, {one.high:.4g}]")


def _of_benches(sources: Sources) -> dict[str, Measure]:
    found = {}
    for bench in sources.benches:
        config = bench.result.get("config")
        about = {**(config if isinstance(config, dict) else {}), **bench.result}
        for row in bench.result["rows"]:
            if not isinstance(row, dict):
                continue
            named = {**about, **row}
            name = " ".join(f"{named[key]}" for key in _NAMES if named.get(key) is not None)
            for key in _QUANTILES:
                values = row.get(key)
                low, middle, high = (
                    finite(values.get(part)) if isinstance(values, dict) else None for part in ("p20", "p50", "p80")
                )
                if middle is not None:
                    found[f"{name}: {key}"] = Measure(middle, low, high)
    return found


def _of_studies(comparisons: Sequence[Mapping[str, Any]]) -> dict[str, Measure]:
    found = {}
    for comparison in comparisons:
        for line in comparison["lines"]:
            for run, cell in zip(comparison["runs"], line["measured"], strict=True):
                if cell is not None and cell["num_seeds"]:
                    several = cell["num_seeds"] > 1
                    key = f"{comparison['study']} ({run['scale']}) {line['row']}: {line['metric']}"
                    low, high = (cell["min"], cell["max"]) if several else (None, None)
                    found[key] = Measure(cell["mean"], low, high)
    return found


def _of_runs(groups: Sequence[Group[Run]], side: Sequence[Run]) -> dict[str, Measure]:
    """Of the runs of a side that have ended. ``groups`` has the runs of both sides."""
    ended = {id(run) for run in side if run.final}
    found = {}
    for group in groups:
        mine = Group(name=group.name, runs=[run for run in group.runs if id(run) in ended])
        for metric in ("train_loss", "accuracy", "total_seconds"):
            if values := mine.values(metric):
                low, high = (min(values), max(values)) if len(values) > 1 else (None, None)
                found[f"run {group.name}: {metric}"] = Measure(statistics.fmean(values), low, high)
    return found
