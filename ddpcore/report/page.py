"""One HTML page from runs, studies and bench results. It loads nothing from a network."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ddpcore.bench.commands import kind_of
from ddpcore.display.chart import Chart, thinned_chart, with_values
from ddpcore.display.picture import Figure, svg_of
from ddpcore.display.table import plain_lines
from ddpcore.report.baseline import baseline_section
from ddpcore.report.curvature import curvature_sections
from ddpcore.report.groups import grouped
from ddpcore.report.plotly_chart import figure_of
from ddpcore.report.runs import labels, run_sections
from ddpcore.report.section import Section, TableData
from ddpcore.report.sources import Bench, Sources
from ddpcore.report.studies import compare_all, study_section
from ddpcore.report.timeline import timeline_sections
from ddpcore.storage.limits import plain, shown

try:
    import jinja2
    from plotly.offline import get_plotlyjs
except ImportError:  # the extra `report`
    jinja2 = None  # type: ignore[assignment]

ASSETS = Path(__file__).parent / "assets"


def check_report() -> None:
    """Raise ValueError if a library that draws the page is not installed."""
    if jinja2 is None or Figure is None:
        raise ValueError("the report needs jinja2, plotly and matplotlib: pip install 'ddpcore[report]'")


def page_of(sections: Sequence[Section]) -> str:
    """The page of these sections as text."""
    by_section: dict[int, list[dict[str, Any]]] = {}
    for number, section in enumerate(sections):
        by_section[number] = [_drawn(chart, f"chart-{number}-{place}") for place, chart in enumerate(section.charts)]
    texts = {name: (ASSETS / name).read_text() for name in ("page.css", "page.js")}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(plain=plain, plain_lines=plain_lines)
    figures = {chart["id"]: chart["figure"] for found in by_section.values() for chart in found}
    return environment.get_template("page.html.j2").render(
        sections=sections, charts=by_section, css=texts["page.css"], js=texts["page.js"],
        figures=_json(figures), plotly=_plotly() if figures else "", title="ddpcore report",
    )  # fmt: skip


def sections_of(sources: Sources, baseline: Sources | None = None, by: Sequence[str] = ()) -> list[Section]:
    """All sections of the page. A part that cannot be shown is a problem in its place, and the others are shown.

    Args:
        sources: what to show.
        baseline: what to compare it with.
        by: the fields of the config by which runs are grouped, see :func:`ddpcore.report.groups.grouped`.

    Raises:
        ValueError: no run has a field of ``by``.
    """
    groups = grouped(sources.runs, by)
    comparisons, problems = compare_all(sources.studies) if sources.studies else ([], [])
    sections = [Section(title="Not shown", problems=[*sources.problems, *problems])]
    if baseline is not None:
        others, more = compare_all(baseline.studies) if baseline.studies else ([], [])
        lost = [f"baseline: {problem}" for problem in (*baseline.problems, *more)]
        sections.append(Section(title="The baseline, not read", problems=lost))
        sections += _guarded(lambda: [baseline_section(sources, baseline, comparisons, others)], "the baseline")
    sections += _guarded(lambda: run_sections(sources.runs, groups), "the runs")
    names = labels(sources.runs)
    colors = [number for run in sources.runs for number, group in enumerate(groups) if run in group.runs]
    sections += _guarded(lambda: curvature_sections(sources.runs, names, colors), "the curvature of the runs")
    for run, name in zip(sources.runs, names, strict=True):
        what = f"the recorded steps of {name}"
        sections += _guarded(lambda one=run, name=name: timeline_sections(one, name), what)  # type: ignore[misc]
    for comparison in comparisons:
        sections += _guarded(lambda one=comparison: [study_section(one)], comparison["study"])  # type: ignore[misc]
    for bench in sources.benches:
        sections += _guarded(lambda one=bench: [bench_section(one)], bench.name)  # type: ignore[misc]
    return [one for one in sections if one.lines or one.tables or one.charts or one.problems]


def bench_section(bench: Bench) -> Section:
    """The section of a bench result.

    Raises:
        ValueError: no bench writes such a result, or a part of it is missing.
    """
    kind = kind_of(bench.result)
    if kind is None:
        raise ValueError(
            f"{shown(bench.name)} is not the result of a bench that this version knows: run the bench again"
        )
    try:
        parts, charts = kind.parts(bench.result), kind.charts(bench.result)
        tables = [part for part in parts if isinstance(part, Table)]
        captions = [_cell_text(table.caption) for table in tables if table.caption]
        return Section(
            title=f"{kind.title}: {bench.name}",
            lines=[*(part for part in parts if isinstance(part, str)), *captions],
            tables=[table_data(table) for table in tables],
            charts=with_values(charts),
        )
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{bench.name} is damaged or of another version ({plain(reason)}): run the bench again"
        ) from None


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


def _guarded(make: Callable[[], Sequence[Section]], what: str) -> Sequence[Section]:
    """The sections, or the reason why there are none: a damaged file must not cost the rest of the report."""
    try:
        return make()
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        known = isinstance(error, ValueError) and what in str(error)
        reason = str(error) if known else f"{what} cannot be shown ({type(error).__name__}: {error}): is it damaged?"
        return [Section(title="Not shown", problems=[plain(reason)])]


def _drawn(chart: Chart, name: str) -> dict[str, Any]:
    """What the template needs of a chart. A chart of damaged values becomes an empty one that says so."""
    try:
        thin = thinned_chart(chart)
        svg = base64.b64encode(svg_of(thin).encode()).decode()
        figure = figure_of(thin)
    except (ValueError, TypeError, ArithmeticError, IndexError) as error:
        note = f"This chart cannot be drawn ({type(error).__name__}: {error}): are the values damaged?"
        return _drawn(Chart(title=chart.title, note=note), name)
    return {"id": name, "title": plain(chart.title), "note": plain(thin.note), "kind": chart.kind, "svg": svg,
            "figure": figure, "rows": _num_rows(chart)}  # fmt: skip


def _num_rows(chart: Chart) -> int:
    """How many rows a chart of bars or dots has; bars of several series lie below each other."""
    longest = max((len(series.x) for series in chart.series), default=0)
    return longest * (len(chart.series) if chart.kind == "bars" else 1)


def _json(value: Any) -> str:
    """JSON for a script element: no text of it can end the element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", r"\u003c").replace("&", r"\u0026")


@cache
def _plotly() -> str:
    """plotly.js, compressed; the page unpacks it. It has 4.8 MB, and 1.9 MB in this form."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
