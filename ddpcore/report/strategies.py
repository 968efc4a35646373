"""The comparison of strategies as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from ddpcore.report.table import output, print_environment, spread, table_of


def print_strategies(result: dict[str, Any], config: Any, console: Console | None = None) -> None:
    """Print the environment and a line for each strategy.

    Args:
        result: ``{"environment": ..., "rows": [...]}``, as in the JSON file.
        config: has the attributes model, dataset, batch_size and steps, which are shown.
        console: standard output by default.
    """
    out = output(console)
    print_environment(result["environment"], out)
    title = f"{config.model} on {config.dataset}, global batch {config.batch_size}, {config.steps} steps"
    out.print(table_of(_COLUMNS, result["rows"], title=title, left=("strategy",)))


def _number(value: float | None, pattern: str, missing: str = "-") -> str:
    return missing if value is None else pattern.format(value)


_COLUMNS = {
    "strategy": lambda row: row["strategy"] + (f" {row['topology']}" if row["topology"] else ""),
    "samples/s": lambda row: _number(row["samples_per_s"], "{:,.0f}"),
    "vs ddp": lambda row: _number(row["ratio_to_ddp"], "{:.2f}x"),
    "step ms p20/p50/p80": lambda row: spread(row["step_ms"]),
    "exposed ms": lambda row: _number(row["exposed_comm_ms"], "{:.2f}"),
    "kB/step": lambda row: _number(None if row["bytes_per_step"] is None else row["bytes_per_step"] / 1000, "{:,.1f}"),
    "loss first": lambda row: _number(row["loss_first"], "{:.3f}"),
    "loss last": lambda row: _number(row["loss_last"], "{:.3f}", "diverged"),
    "test error %": lambda row: _number(row["test_error_pct"], "{:.2f}"),
    "consensus": lambda row: _number(row["consensus_distance"], "{:.2e}"),
}
