"""Tables of the terminal from plain records, their printing, and numbers as text."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ddpcore.storage.files import plain

WIDE = 400  # columns of a console that shows whole tables
MISSING = "-"  # the text of a cell without a number
PADDING = 3  # columns of a table's column besides its text

Row = Mapping[str, Any]
Cell = Callable[[Row], str]


class RecordTable(Table):
    """A table whose columns may be left out, but for the first and for those ``asked`` for."""

    asked: Sequence[str] = ()


def console_of(*, wide: bool) -> Console:
    """Standard output, as wide as the terminal. ``wide``, a pipe and a file show all columns of tables."""
    return Console(width=WIDE) if wide or not sys.stdout.isatty() else Console()


def print_parts(console: Console | None, *parts: Table | str) -> None:
    """Print tables, and lines of text without markup and wrapping, to the console (None: standard output).

    Columns of a :class:`RecordTable` that does not fit the console are left out, and a line names them: first those
    with the same text in all rows, then the others, the last ones first.
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


def _fit(table: RecordTable, console: Console) -> list[str]:
    """Remove columns until the table fits the console. Returns their headings, with the text that all rows share."""
    asked = {cell_of(heading) for heading in table.asked}
    same = [column for column in table.columns if table.row_count > 1 and len({*column.cells}) == 1]
    spare = [column for column in table.columns[1:] if column.header not in asked]
    hidden: list[Column] = []
    for column in (*(one for one in spare[::-1] if one in same), *(one for one in spare[::-1] if one not in same)):
        if 1 + sum(map(_width, table.columns)) <= console.width:
            break
        table.columns.remove(column)
        hidden.append(column)
    if console.measure(table).maximum >= console.width:
        for column in table.columns:
            column.width = _width(column) - PADDING  # headings are wrapped, and no word is cut
    texts = {id(one): f" ({next(iter(one.cells))} in all rows)" if one in same else "" for one in hidden}
    return [f"{one.header}{texts[id(one)]}" for one in sorted(hidden, key=lambda one: one._index)]


def _width(column: Column) -> int:
    """Of its longest cell, or of the longest word of its heading, with padding and border."""
    heading = str(column.header)
    cells = [line for cell in column.cells for line in str(cell).splitlines()]
    return PADDING + max(map(cell_len, [*([heading] if column.no_wrap else heading.split()), *cells]), default=0)


def table_of(
    columns: Mapping[str, Cell], rows: Iterable[Row], *, left: Sequence[str], asked: Sequence[str] = (),
    group: str | None = None, title: str = "",
) -> RecordTable:  # fmt: skip
    """A table with a line for each row.

    Args:
        columns: heading -> function that returns the text of a row's cell. A column without a number is left out.
        rows: as in the JSON file.
        left: headings of columns that are aligned left, and whose text is never wrapped.
        asked: headings of columns that a narrow terminal shows, too.
        group: a key of rows; a rule separates rows with different values.
        title: stands above the table.
    """
    table = RecordTable(title=cell_of(title), title_justify="left")
    table.asked, records = asked, list(rows)
    lines = [[cell_of(cell(row)) for cell in columns.values()] for row in records]
    shown = [any(line[place] != MISSING for line in lines) or not lines for place in range(len(columns))]
    for heading in compress(columns, shown):
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=heading in left)
    for row, line, after in zip(records, lines, [*records[1:], None], strict=False):
        is_last = group is not None and after is not None and row[group] != after[group]
        table.add_row(*compress(line, shown), end_section=is_last)
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
