"""Operations and transports as text, with the columns of nccl-tests."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ddpcore.report.table import print_environment

WIDTH = 130


def print_comm(result: dict[str, Any], console: Console | None = None) -> None:
    """Print the environment and a line an operation, size and transport.

    Args:
        result: as in the JSON file.
        console: where to; standard output by default.
    """
    out = console or Console()
    if not out.is_terminal:  # a pipe or a file has no width to fit
        out = Console(file=out.file, width=WIDTH)
    print_environment(result["environment"], out)
    table = Table(title=f"{result['world_size']} ranks, slowest rank's time", title_justify="left")
    for heading in _COLUMNS:
        table.add_column(heading, justify="left" if heading in ("op", "transport") else "right", no_wrap=True)
    rows = sorted(result["rows"], key=lambda row: _order(result["rows"], row))
    for number, row in enumerate(rows):
        last = number + 1 == len(rows) or rows[number + 1]["op"] != row["op"]
        table.add_row(*(cell(row) for cell in _COLUMNS.values()), end_section=last)
    out.print(table)


def _order(rows: list[dict[str, Any]], row: dict[str, Any]) -> tuple[int, int]:
    """By operation, as they first come, and then by size."""
    return list(dict.fromkeys(one["op"] for one in rows)).index(row["op"]), row["size_bytes"]


def _bytes(size: int) -> str:
    return f"{size // 2**20} MiB" if size % 2**20 == 0 else f"{size / 2**10:g} KiB"


_COLUMNS = {
    "op": lambda row: row["op"],
    "transport": lambda row: row["transport"],
    "size": lambda row: _bytes(row["size_bytes"]),
    "count": lambda row: f"{row['count']:,}",
    "type": lambda row: row["type"],
    "time us p50": lambda row: f"{row['time_us']['p50']:,.1f}",
    "p99": lambda row: f"{row['time_us']['p99']:,.1f}",
    "algbw GB/s": lambda row: f"{row['algbw_gb_per_s']:.2f}",
    "busbw GB/s": lambda row: f"{row['busbw_gb_per_s']:.2f}",
    "#wrong": lambda row: str(row["num_wrong"]),
}
