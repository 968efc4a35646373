"""What all reports share: printing, tables from plain records, and numbers as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

WIDTH = 160  # of pipes and files, which have no width of their own

Row = Mapping[str, Any]
Cell = Callable[[Row], str]


def print_parts(console: Console | None, *parts: Table | str) -> None:
    """Print tables, and lines of text without markup and wrapping.

    Args:
        console: standard output by default; a pipe or a file is WIDTH wide.
        parts: printed in this order.
    """
    out = console or Console()
    if not out.is_terminal:
        out = Console(file=out.file, width=WIDTH)
    for part in parts:
        if isinstance(part, str):
            out.print(plain_lines(part), highlight=False, markup=False, soft_wrap=True)
        else:
            out.print(part)


def table_of(
    columns: Mapping[str, Cell], rows: Iterable[Row], *, left: Sequence[str], group: str | None = None, **more: Any
) -> Table:
    """A table with a line for each row.

    Args:
        columns: heading -> function that returns the text of a row's cell.
        rows: as in the JSON file.
        left: headings of columns that are aligned left, and whose text is never wrapped.
        group: a key of rows; a rule separates rows with different values.
        more: arguments of ``rich.table.Table``.
    """
    texts = {key: escape(plain(text)) for key, text in more.items() if isinstance(text, str)}
    table = Table(title_justify="left", **{**more, **texts})
    for heading in columns:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=heading in left)
    before = None
    for row in rows:
        if group is not None and before is not None and row[group] != before[group]:
            table.add_section()
        table.add_row(*(escape(plain(cell(row))) for cell in columns.values()))
        before = row
    return table


def plain(text: str) -> str:
    """The text with every character that is not printable as an escape, such as ``\\x1b`` or ``\\n``.

    So a name from a file cannot add lines, move the cursor or change colours.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plain_lines(text: str) -> str:
    """The same line by line: text of ours may have several lines."""
    return "\n".join(map(plain, text.split("\n")))


def number(key: str, pattern: str = "{:.2f}", missing: str = "-") -> Cell:
    """The cell that shows a row's number by this pattern, or ``missing`` for None."""
    return lambda row: missing if row[key] is None else pattern.format(row[key])


def spread(quantiles: Mapping[str, float], pattern: str = ".2f") -> str:
    """The 20th, 50th and 80th percentile as ``p20/p50/p80``."""
    return "/".join(format(quantiles[name], pattern) for name in ("p20", "p50", "p80"))


def interval(quantiles: Mapping[str, float], pattern: str = ".2f", separator: str = ", ") -> str:
    """The median, and the 20th and 80th percentile in brackets."""
    middle, low, high = (format(quantiles[name], pattern) for name in ("p50", "p20", "p80"))
    return f"{middle} [{low}{separator}{high}]"


def size_name(mb: float | None) -> str:
    """A bucket size as text. Infinity, which is None in JSON, is one bucket."""
    return "one bucket" if mb in (None, float("inf")) else f"{mb:g} MiB"


def environment_lines(environment: Row) -> list[str]:
    """The machine, the connection between the learners, and notes."""
    lines = [
        f"{environment['device']}, {environment['cores']} cores, {environment['threads_per_rank']} threads a rank; "
        f"torch {environment['torch']}, ddpcore {environment['ddpcore']} ({environment['commit'] or 'installed'})",
        f"backend {environment['backend']}: {environment['backend_reason']}",
    ]
    if environment["transport"] is not None:
        lines.append(f"transport {environment['transport']}: {environment['transport_reason']}")
    if environment["oversubscribed"]:
        lines.append("oversubscribed: more ranks than cores. Compare strategies in this table, not their scaling.")
    return [*lines, *environment["notes"]]
