"""The overhead of statistics as text."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_stats(result: dict[str, Any], console: Console | None = None) -> None:
    """Print a line for each contender of the statistics bench.

    Args:
        result: as in the JSON file.
        console: where to; standard output by default.
    """
    config = result["config"]
    what = f"{config['model']}, {config['strategy']}, {config['world_size']} learners ({config['backend']})"
    table = Table(
        title=f"{what}, batch {config['batch_size']} each, a record every {config['every']} steps",
        caption="medians of blocks run in turn, [p20 to p80]; overhead: against the block of 'off' beside it",
        title_justify="left",
    )
    for heading in ("statistics", "ms a step", "overhead", "measuring", "records"):
        table.add_column(heading, justify="left" if heading == "statistics" else "right", no_wrap=True)
    for row in result["rows"]:
        step, measuring = row["step_ms"], row["measuring_pct"]
        table.add_row(
            row["statistics"],
            f"{step['p50']:.2f} [{step['p20']:.2f}, {step['p80']:.2f}]",
            _percent(row["overhead_pct"]),
            "-" if measuring is None else f"{measuring['p50']:.2f} %",
            str(row["num_records"]),
        )
    (console or Console()).print(table)


def _percent(quantiles: dict[str, float]) -> str:
    return f"{quantiles['p50']:+.1f} % [{quantiles['p20']:+.1f}, {quantiles['p80']:+.1f}]"
