"""Sections of the page about studies: published beside measured, verdicts, and charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpcore.experiments.charts import curve_charts, study_charts
from ddpcore.experiments.compare import compare
from ddpcore.experiments.tables import about_runs, claim_cells, comparison_cells, run_label
from ddpcore.report.section import Section, TableData
from ddpcore.storage.limits import plain


def compare_all(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """The comparisons of all studies that can be read, and what is wrong with the others.

    Folders that cannot be compared with each other are shown one by one.
    """
    good, problems = [], []
    for path in paths:
        try:
            compare([path])
            good.append(path)
        except (ValueError, OSError) as error:
            problems.append(plain(str(error)))
    try:
        return compare(good) if good else [], problems
    except ValueError as error:
        return [one for path in good for one in compare([path])], [*problems, plain(str(error))]


def study_section(comparison: Mapping[str, Any]) -> Section:
    """The section of one study."""
    labels, tables, folded = [run_label(run) for run in comparison["runs"]], [], []
    if comparison["claims"]:
        heading, rows = claim_cells(comparison)
        unknown = [row for row, claim in zip(rows, comparison["claims"], strict=True)
                   if claim["on_published"]["word"] == "not run"]  # fmt: skip
        for row in unknown:
            row[3] = "-"  # the document has no such numbers
        kept = 4 if len(unknown) == len(rows) else 3
        short = [[*row[:2], *row[kept:]] for row in (heading, *rows)]  # without the predicates
        tables.append(TableData(title="Claims", headings=short[0], rows=short[1:], num_left=len(short[0])))
        folded.append(TableData(title="Predicates of the claims", headings=heading[::2][:2],
                                rows=[[row[0], row[2]] for row in rows], num_left=2))  # fmt: skip
    heading, rows = comparison_cells(comparison)
    first = comparison["metrics"][0]
    shown = [row for row, line in zip(rows, comparison["lines"], strict=True)
             if line["metric"] == first or line["published"] is not None]  # fmt: skip
    tables.append(TableData(title="Published and measured", headings=heading, rows=shown, num_left=2))
    notes = TableData(title="Notes", headings=["note"], rows=[[note] for note in comparison["notes"]])
    every = TableData(title="All metrics", headings=heading, rows=rows, num_left=2)
    results, about = _results(comparison, labels), [f"Published: {comparison['source']}.", *about_runs(comparison)]
    folded += [one for one, given in ((every, len(shown) < len(rows)), (notes, comparison["notes"])) if given]
    return Section(
        title=comparison["title"],
        lines=[comparison["question"], *results, *about],
        tables=tables,
        folded=folded,
        charts=[*study_charts(comparison, labels), *curve_charts(comparison, labels)],
        charts_first=True,
        problems=[plain(f"{problem}: the rest is shown") for problem in comparison["problems"]],
    )


def _results(comparison: Mapping[str, Any], labels: Sequence[str]) -> list[str]:
    """A sentence for each folder: how many of the claims have which verdict."""
    found = []
    for place, label in enumerate(labels if comparison["claims"] else ()):
        words = Counter(claim["verdicts"][place]["word"] for claim in comparison["claims"])
        told = ", ".join(f"{num} with the verdict {word!r}" for word, num in words.most_common())
        found.append(f"Result, {label}: {words.total()} claims, {told}.")
    return found
