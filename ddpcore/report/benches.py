"""Sections of the page about bench results: the tables that the benches print, and charts of them."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from ddpcore.bench.commands import kind_of
from ddpcore.display.chart import with_values
from ddpcore.report.section import Section, TableData
from ddpcore.report.sources import Bench
from ddpcore.storage.limits import plain, shown


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
        captions = [_plain(table.caption) for table in tables if table.caption]
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
    cells = [[_plain(cell) for cell in column.cells] for column in table.columns]
    left = [column.justify == "left" for column in table.columns]
    return TableData(
        title=_plain(table.title or ""),
        headings=[_plain(column.header) for column in table.columns],
        rows=list(zip(*cells, strict=True)),
        num_left=left.index(False) if False in left else len(left),
    )


def _plain(cell: Any) -> str:
    return Text.from_markup(cell).plain if isinstance(cell, str) else str(cell)
