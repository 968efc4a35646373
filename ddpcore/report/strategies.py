"""The comparison of strategies as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ddpcore.report.table import environment_lines, number, print_parts, spread, table_of


def print_strategies(result: dict[str, Any], config: Any, console: Console | None = None) -> None:
    """Print the environment and a line for each strategy.

    Args:
        result: ``{"environment": ..., "rows": [...]}``, as in the JSON file.
        config: its attributes model, dataset, batch_size and steps are shown.
        console: standard output by default.
    """
    title = f"{config.model} on {config.dataset}, global batch {config.batch_size}, {config.steps} steps"
    print_parts(console, *strategy_parts(result, title))


def strategy_parts(result: dict[str, Any], title: str) -> list[Table | str]:
    """The environment, and a table with a line for each strategy."""
    table = table_of(_COLUMNS, result["rows"], title=title, left=("strategy",))
    return [*environment_lines(result["environment"]), table]


_COLUMNS = {
    "strategy": lambda row: row["strategy"] + (f" {row['topology']}" if row["topology"] else ""),
    "samples/s": number("samples_per_s", "{:,.0f}"),
    "vs ddp": number("ratio_to_ddp", "{:.2f}x"),
    "step ms p20/p50/p80": lambda row: spread(row["step_ms"]),
    "exposed ms": number("exposed_comm_ms"),
    "kB/step": lambda row: "-" if row["bytes_per_step"] is None else f"{row['bytes_per_step'] / 1000:,.1f}",
    "loss first": number("loss_first", "{:.3f}"),
    "loss last": number("loss_last", "{:.3f}", "diverged"),
    "test error %": number("test_error_pct"),
    "consensus": number("consensus_distance", "{:.2e}"),
}
