"""One HTML page from runs, studies and bench results, and its charts as files. It loads nothing from a network."""

import base64
import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from rich.table import Table
from rich.text import Text

from ddpcore.bench.commands import kind_of
from ddpcore.display.chart import Chart, with_values
from ddpcore.display.picture import pdf_of, svg_of
from ddpcore.display.table import plain_lines
from ddpcore.experiments.charts import curve_charts, study_charts
from ddpcore.experiments.compare import about_runs, claim_cells, compare, comparison_cells, run_label
from ddpcore.report.groups import grouped
from ddpcore.report.runs import curvature_sections, run_sections, timeline_sections
from ddpcore.report.sources import Section, Sources, TableData
from ddpcore.storage.files import plain, replace_file, shown

ASSETS = Path(__file__).parent / "assets"


def page_of(sections: Sequence[Section]) -> str:
    """The page of these sections as text."""
    texts = {name: (ASSETS / f"page.{name}").read_text() for name in ("css", "js")}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(plain=plain, plain_lines=plain_lines, drawn=_drawn)
    return environment.get_template("page.html.j2").render(sections=sections, title="ddpcore report", **texts)


def sections_of(sources: Sources, by: Sequence[str] = ()) -> list[Section]:
    """All sections of the page; ``by`` as in :func:`ddpcore.report.groups.grouped`.

    A part that cannot be shown is a problem in its place, and the others are shown.
    """
    groups = grouped(sources.runs, by)
    comparisons, problems = compare_all(sources.studies) if sources.studies else ([], [])
    sections = [Section(title="Not shown", problems=[*sources.problems, *problems])]
    colors = [number for run in sources.runs for number, group in enumerate(groups) if run in group.runs]
    sections += _guarded("the runs", run_sections, sources.runs, groups)
    sections += _guarded("the curvature of the runs", curvature_sections, sources.runs, colors)
    for run in sources.runs:
        sections += _guarded(f"the recorded steps of {run.label}", timeline_sections, run)
    for comparison in comparisons:
        sections += _guarded(comparison["study"], study_section, comparison)
    for name, result in sources.benches.items():
        sections += _guarded(name, bench_section, name, result)
    return [one for one in sections if one.lines or one.tables or one.charts or one.problems]


def bench_section(name: str, result: dict[str, Any]) -> Section:
    """The section of the bench result of a file. ValueError: no bench writes such a result, or a part is missing."""
    if (kind := kind_of(result)) is None:
        raise ValueError(f"{shown(name)} is not the result of a bench that this version knows: run the bench again")
    try:
        parts, charts = kind.parts(result), kind.charts(result)
        return Section(
            title=f"{kind.title}: {name}",
            lines=[part for part in parts if isinstance(part, str)],
            tables=[table_data(part) for part in parts if isinstance(part, Table)],
            charts=with_values(charts),
        )
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        reason = plain(f"{type(error).__name__}: {error}")
        raise ValueError(f"{name} is damaged or of another version ({reason}): run the bench again") from None


def table_data(table: Table) -> TableData:
    """A table of the terminal as a table of the page."""
    cells = [[_cell_text(cell) for cell in column.cells] for column in table.columns]
    left = [column.justify == "left" for column in table.columns]
    return TableData(
        title=_cell_text(table.title or ""),
        headings=[_cell_text(column.header) for column in table.columns],
        rows=list(zip(*cells, strict=True)),
        num_left=left.index(False) if False in left else len(left),
    )


def _cell_text(cell: Any) -> str:
    return Text.from_markup(cell).plain if isinstance(cell, str) else str(cell)


def _guarded(what: str, make: Callable[..., Section | Sequence[Section]], *arguments: Any) -> Sequence[Section]:
    """The sections, or the reason why there are none: a damaged file must not cost the rest of the report."""
    try:
        found = make(*arguments)
        return [found] if isinstance(found, Section) else found
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        known = isinstance(error, ValueError) and what in str(error)
        reason = str(error) if known else f"{what} cannot be shown ({type(error).__name__}: {error}): is it damaged?"
        return [Section(title="Not shown", problems=[plain(reason)])]


def _drawn(chart: Chart) -> dict[str, str]:
    """What the template needs of a chart. A chart of damaged values becomes an empty one that says so."""
    try:
        svg = base64.b64encode(svg_of(chart).encode()).decode()
    except (ValueError, TypeError, ArithmeticError, IndexError) as error:
        note = f"This chart cannot be drawn ({type(error).__name__}: {error}): are the values damaged?"
        return _drawn(Chart(title=chart.title, note=note))
    return {"title": plain(chart.title), "note": plain(chart.note), "kind": chart.kind, "svg": svg}


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
        kept = 4 if all(row[3] == "-" for row in rows) else 3  # without published numbers if there are none
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


def write_figures(sections: Sequence[Section], folder: Path) -> int:
    """Write ``TITLE.pdf``, ``.svg`` and ``.csv`` for each chart, and return how many charts there are.

    Charts with equal titles get a number. The CSV has all points, the pictures too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken: dict[str, int] = {}
    charts = [chart for section in sections for chart in section.charts]
    for chart in charts:
        name = re.sub(r"[^a-z0-9]+", "-", chart.title.lower()).strip("-")[:80] or "chart"
        taken[name] = taken.get(name, 0) + 1
        name += f"-{taken[name]}" if taken[name] > 1 else ""
        for suffix, content in (("pdf", pdf_of(chart)), ("svg", svg_of(chart).encode()), ("csv", _csv(chart))):
            replace_file(folder / f"{name}.{suffix}", content)
    return len(charts)


def _csv(chart: Chart) -> bytes:
    """A line for each point: its curve, x and y, and the ends of its band; what is not known is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("series", "x", "y", "low", "high"))
    for series in chart.series:
        gaps = [None] * len(series.y)
        for row in zip(series.x, series.y, series.low or gaps, series.high or gaps, strict=True):
            writer.writerow([series.name, *row])
    return out.getvalue().encode()
