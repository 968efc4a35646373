"""One HTML page from runs, studies and bench results. It loads nothing from a network."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from rich.table import Table
from rich.text import Text

from ddpcore.bench.commands import kind_of
from ddpcore.display.chart import Chart, with_values
from ddpcore.display.picture import svg_of
from ddpcore.display.table import plain_lines
from ddpcore.report.curvature import curvature_sections
from ddpcore.report.groups import grouped
from ddpcore.report.runs import run_sections
from ddpcore.report.section import Section, TableData
from ddpcore.report.sources import Sources
from ddpcore.report.studies import compare_all, study_section
from ddpcore.report.timeline import timeline_sections
from ddpcore.storage.limits import plain, shown

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
    kind = kind_of(result)
    if kind is None:
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
