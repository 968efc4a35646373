"""Operations over transports as a table, with the columns of nccl-tests."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ddpcore.report.table import environment_lines, number, print_parts, table_of


def print_comm(result: dict[str, Any], console: Console | None = None) -> None:
    """Print the environment and a line for each operation, size and transport in a result (as in the JSON file)."""
    print_parts(console, *comm_parts(result))


def comm_parts(result: dict[str, Any]) -> list[Table | str]:
    """What :func:`print_comm` prints."""
    operations = list(dict.fromkeys(row["op"] for row in result["rows"]))
    rows = sorted(result["rows"], key=lambda row: (operations.index(row["op"]), row["size_bytes"]))
    title = f"{result['world_size']} ranks, slowest rank's time"
    table = table_of(_COLUMNS, rows, title=title, left=("op", "transport"), group="op")
    return [*environment_lines(result["environment"]), table]


def _bytes(size: int) -> str:
    return f"{size // 2**20} MiB" if size % 2**20 == 0 else f"{size / 2**10:g} KiB"


_COLUMNS = {
    "op": lambda row: row["op"],
    "transport": lambda row: row["transport"],
    "size": lambda row: _bytes(row["size_bytes"]),
    "count": number("count", "{:,}"),
    "type": lambda row: row["type"],
    "time us p50": lambda row: f"{row['time_us']['p50']:,.1f}",
    "p99": lambda row: f"{row['time_us']['p99']:,.1f}",
    "algbw GB/s": number("algbw_gb_per_s"),
    "busbw GB/s": number("busbw_gb_per_s"),
    "#wrong": number("num_wrong", "{}"),
}
