"""What moved against a baseline by more than its spread: bench rows, rows of studies, and runs with several seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpcore.report.chart import Section, TableData, finite
from ddpcore.report.sources import Run, Sources

# Columns of bench rows that name a row, and those with p20, p50 and p80.
_NAMES = ("strategy", "topology", "transport", "op", "size_bytes", "bucket_mb", "comparison", "list", "implementation",
          "statistics", "num_buckets", "world_size")  # fmt: skip
_OF_RUNS = ("strategy", "topology", "model", "dataset", "batch_size", "lr")
_QUANTILES = ("step_ms", "ms", "time_us", "measured_ms", "overhead_pct")


@dataclass(frozen=True)
class Measure:
    """A value and its spread; None without a spread, of one seed."""

    middle: float
    low: float | None
    high: float | None


def baseline_section(now: Sources, before: Sources, comparisons: Sequence[Any], others: Sequence[Any]) -> Section:
    """The measures that both have, and which of them moved beyond the spread of both."""
    mine, theirs = ({**_of_benches(one), **_of_runs(one.runs)} for one in (now, before))
    mine |= _of_studies(comparisons)
    theirs |= _of_studies(others)
    shared = [key for key in mine if key in theirs]
    if not shared:
        reason = "The report and the baseline have no measure in common, so nothing is compared: name the same kind "
        return Section(title="Against the baseline", problems=[f"{reason}of runs, studies or bench files."])
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
        return "no spread: run it with several seeds"
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
        for row in bench.result["rows"]:
            if not isinstance(row, dict):
                continue
            name = " ".join(f"{row[key]}" for key in _NAMES if row.get(key) is not None)
            for key in _QUANTILES:
                values = row.get(key)
                if isinstance(values, dict) and finite(values.get("p50")) is not None:
                    low, high = finite(values.get("p20")), finite(values.get("p80"))
                    found[f"{name}: {key}"] = Measure(values["p50"], low, high)
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


def _of_runs(runs: Sequence[Run]) -> dict[str, Measure]:
    """Runs that differ in their seed alone are one group."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        config = {key: value for key, value in run.header["config"].items() if key not in ("seed", "data_dir")}
        groups.setdefault(json.dumps(config, sort_keys=True, default=str), []).append(run)
    found = {}
    for key, group in groups.items():
        config = json.loads(key)
        name = " ".join(str(config.get(part)) for part in _OF_RUNS)
        while f"run {name}: train_loss" in found:
            name += "'"  # another group that differs in a field that the name does not show
        for metric, values in _finals(group).items():
            low, high = (min(values), max(values)) if len(values) > 1 else (None, None)
            found[f"run {name}: {metric}"] = Measure(statistics.fmean(values), low, high)
    return found


def _finals(group: Sequence[Run]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for run in group:
        last = run.epochs[-1] if run.epochs and run.final else {}
        for metric in ("train_loss", "accuracy", "total_seconds"):
            value = finite(last.get(metric))
            if value is not None:
                values.setdefault(metric, []).append(value)
    return values
