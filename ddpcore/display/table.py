"""Tables of the terminal from plain records, their printing, and numbers as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ddpcore.storage.limits import plain

WIDE = 400  # columns of a console that shows whole tables
MISSING = "-"  # the text of a cell without a number
PADDING = 3  # columns of a table's column besides its text

Row = Mapping[str, Any]
Cell = Callable[[Row], str]


class RecordTable(Table):
    """A table whose last columns may be left out."""


def console_of(*, wide: bool) -> Console:
    """Standard output, as wide as the terminal; 80 columns in a pipe. ``wide`` shows all columns of tables."""
    return Console(width=WIDE) if wide else Console()


def print_parts(console: Console | None, *parts: Table | str) -> None:
    """Print tables, and lines of text without markup and wrapping.

    The last columns of a :class:`RecordTable` that does not fit the console are left out, and a line names them.

    Args:
        console: standard output by default.
        parts: printed in this order.
    """
    out = console or console_of(wide=False)
    for part in parts:
        if isinstance(part, str):
            out.print(plain_lines(part), highlight=False, markup=False, soft_wrap=True)
            continue
        hidden = _fit(part, out) if isinstance(part, RecordTable) else []
        out.print(part)
        if hidden:
            out.print(f"--wide also shows: {', '.join(hidden)}", highlight=False, markup=False, soft_wrap=True)


def _fit(table: Table, console: Console) -> list[str]:
    """Remove the last columns until the table fits the console. Returns their headings."""
    hidden: list[str] = []
    while len(table.columns) > 2 and 1 + sum(map(_width, table.columns)) > console.width:
        hidden.insert(0, str(table.columns.pop().header))
    if console.measure(table).maximum >= console.width:
        for column in table.columns:
            column.width = _width(column) - PADDING  # headings are wrapped, and no word is cut
    return hidden


def _width(column: Column) -> int:
    """Of its longest word, or of its longest cell if it cannot be wrapped, with padding and border."""
    cells = [str(cell) for cell in (column.header, *column.cells)]
    words = [part for cell in cells for part in (cell.splitlines() if column.no_wrap else cell.split())]
    return PADDING + max(map(cell_len, words), default=0)


def table_of(
    columns: Mapping[str, Cell], rows: Iterable[Row], *, left: Sequence[str], group: str | None = None, **more: Any
) -> RecordTable:
    """A table with a line for each row.

    Args:
        columns: heading -> function that returns the text of a row's cell. A column is left out if no row has a number
            for it.
        rows: as in the JSON file.
        left: headings of columns that are aligned left, and whose text is never wrapped.
        group: a key of rows; a rule separates rows with different values.
        more: arguments of ``rich.table.Table``.
    """
    texts = {key: cell_of(text) for key, text in more.items() if isinstance(text, str)}
    table = RecordTable(title_justify="left", **{**more, **texts})
    rows = list(rows)
    lines = [[cell_of(cell(row)) for cell in columns.values()] for row in rows]
    shown = [any(line[place] != MISSING for line in lines) or not lines for place in range(len(columns))]
    for heading in compress(columns, shown):
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=heading in left)
    before = None
    for row, line in zip(rows, lines, strict=True):
        if group is not None and before is not None and row[group] != before[group]:
            table.add_section()
        table.add_row(*compress(line, shown))
        before = row
    return table


def cell_of(text: str) -> str:
    """The text for a cell of a rich table, where it is neither markup nor escape codes."""
    return escape(plain(text))


def plain_lines(text: str) -> str:
    """The text with escapes as :func:`plain` writes them, line by line: text of ours may have several lines."""
    return "\n".join(map(plain, text.split("\n")))


def number(key: str, pattern: str = "{:.2f}", missing: str = MISSING) -> Cell:
    """The cell that shows a row's number by this pattern, or ``missing`` for None."""
    return lambda row: missing if row[key] is None else pattern.format(row[key])


def spread(quantiles: Mapping[str, float], pattern: str = ".2f") -> str:
    """The 20th, 50th and 80th percentile as ``p20/p50/p80``."""
    return "/".join(format(quantiles[name], pattern) for name in ("p20", "p50", "p80"))


def interval(quantiles: Mapping[str, float], pattern: str = ".2f", separator: str = ", ") -> str:
    """The median, and the 20th and 80th percentile in brackets."""
    middle, low, high = (format(quantiles[name], pattern) for name in ("p50", "p20", "p80"))
    return f"{middle} [{low}{separator}{high}]"
