"""The cost of statistics as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ddpcore.report.table import interval, print_parts, table_of


def print_stats(result: dict[str, Any], console: Console | None = None) -> None:
    """Print a line for each contender of the statistics bench; the result is as in the JSON file."""
    print_parts(console, *stats_parts(result))


def stats_parts(result: dict[str, Any]) -> list[Table | str]:
    """What :func:`print_stats` prints."""
    config = result["config"]
    what = f"{config['model']}, {config['strategy']}, {config['world_size']} learners ({config['backend']})"
    title = f"{what}, batch {config['batch_size']} each, a record every {config['every']} steps"
    caption = (
        "medians over interleaved blocks, p20 to p80 in brackets; overhead: relative to the block of 'off' in the same "
        "round"
    )
    return [table_of(_COLUMNS, result["rows"], title=title, left=("statistics",), caption=caption)]


def _percent(quantiles: dict[str, float]) -> str:
    return f"{quantiles['p50']:+.1f} % [{quantiles['p20']:+.1f}, {quantiles['p80']:+.1f}]"


_COLUMNS = {
    "statistics": lambda row: row["statistics"],
    "ms a step": lambda row: interval(row["step_ms"]),
    "overhead": lambda row: _percent(row["overhead_pct"]),
    "measuring": lambda row: "-" if row["measuring_pct"] is None else f"{row['measuring_pct']['p50']:.2f} %",
    "records": lambda row: str(row["num_records"]),
}
