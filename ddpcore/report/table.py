"""The bench's result as text."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_report(result: dict[str, Any], config: Any, console: Console | None = None) -> None:
    """Print the environment and one line a strategy.

    Args:
        result: ``{"environment": ..., "rows": [...]}``, as in the JSON file.
        config: the run's settings; model, dataset, batch_size and steps are shown.
        console: where to; standard output by default.
    """
    out = console or Console()
    if not out.is_terminal:  # a pipe or a file has no width to fit
        out = Console(file=out.file, width=160)
    print_environment(result["environment"], out)
    table = Table(
        title=f"{config.model} on {config.dataset}, global batch {config.batch_size}, {config.steps} steps",
        title_justify="left",
    )
    for heading in _COLUMNS:
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for row in result["rows"]:
        table.add_row(*(cell(row) for cell in _COLUMNS.values()))
    out.print(table)


def print_environment(environment: dict[str, Any], out: Console) -> None:
    """Print what a run on ranks ran on, and what is to be said about it."""
    out.print(
        f"{environment['device']}, {environment['cores']} cores, {environment['threads_per_rank']} threads a rank; "
        f"torch {environment['torch']}, ddpcore {environment['ddpcore']} ({environment['commit'] or 'installed'})",
        highlight=False,
        soft_wrap=True,
    )
    out.print(f"backend {environment['backend']}: {environment['backend_reason']}", highlight=False, soft_wrap=True)
    if environment["transport"] is not None:
        transport = f"transport {environment['transport']}: {environment['transport_reason']}"
        out.print(transport, highlight=False, soft_wrap=True)
    if environment["oversubscribed"]:
        out.print(
            "oversubscribed: more ranks than cores. Compare strategies within this table; it says nothing of scaling.",
            highlight=False,
            soft_wrap=True,
        )
    for note in environment["notes"]:
        out.print(note, highlight=False, soft_wrap=True)


def _number(value: float | None, pattern: str = "{:.3g}", missing: str = "-") -> str:
    return missing if value is None else pattern.format(value)


def _strategy(row: dict[str, Any]) -> str:
    return row["strategy"] + (f" {row['topology']}" if row["topology"] else "")


_COLUMNS = {
    "strategy": _strategy,
    "samples/s": lambda row: _number(row["samples_per_s"], "{:,.0f}"),
    "vs ddp": lambda row: _number(row["ratio_to_ddp"], "{:.2f}x"),
    "step ms p20/p50/p80": lambda row: "/".join(_number(row["step_ms"][q], "{:.2f}") for q in ("p20", "p50", "p80")),
    "exposed ms": lambda row: _number(row["exposed_comm_ms"], "{:.2f}"),
    "kB/step": lambda row: _number(None if row["bytes_per_step"] is None else row["bytes_per_step"] / 1000, "{:,.1f}"),
    "loss first": lambda row: _number(row["loss_first"], "{:.3f}"),
    "loss last": lambda row: _number(row["loss_last"], "{:.3f}", "diverged"),
    "test error %": lambda row: _number(row["test_error_pct"], "{:.2f}"),
    "consensus": lambda row: _number(row["consensus_distance"], "{:.2e}"),
}
