"""What all tables share: the console, columns as functions of a row, and the lines about the environment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 160  # of pipes and files, which have no width of their own

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]


def output(console: Console | None) -> Console:
    """The console to print to: standard output by default. In pipes and files it is WIDTH wide."""
    out = console or Console()
    return out if out.is_terminal else Console(file=out.file, width=WIDTH)


def print_lines(out: Console, *lines: str) -> None:
    """Print lines as they are, without wrapping."""
    for line in lines:
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def table_of(
    columns: Columns, rows: Iterable[Row], *, title: str, left: Sequence[str], group: str | None = None, **more: Any
) -> Table:
    """A table with a line for each row.

    Args:
        columns: heading -> function that returns the text of a row's cell.
        rows: as in the JSON file.
        title: line above the table.
        left: headings of columns that are aligned left, and whose text is never wrapped.
        group: a key of rows; a rule separates rows with different values.
        more: arguments of ``rich.table.Table``.
    """
    table = Table(title=title, title_justify="left", **more)
    for heading in columns:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=heading in left)
    before = None
    for row in rows:
        if group is not None and before is not None and row[group] != before[group]:
            table.add_section()
        table.add_row(*(cell(row) for cell in columns.values()))
        before = row
    return table


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


def print_environment(environment: Row, out: Console) -> None:
    """Print the machine, the connection between the learners, and notes."""
    print_lines(
        out,
        f"{environment['device']}, {environment['cores']} cores, {environment['threads_per_rank']} threads a rank; "
        f"torch {environment['torch']}, ddpcore {environment['ddpcore']} ({environment['commit'] or 'installed'})",
        f"backend {environment['backend']}: {environment['backend_reason']}",
    )
    if environment["transport"] is not None:
        print_lines(out, f"transport {environment['transport']}: {environment['transport_reason']}")
    if environment["oversubscribed"]:
        print_lines(
            out,
            "oversubscribed: more ranks than cores. Compare strategies within this table; it says nothing of scaling.",
        )
    print_lines(out, *environment["notes"])
