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
    return [*environment_lines(result["environment"]), table, *seen(result["rows"])]


def seen(rows: list[dict[str, Any]]) -> list[str]:
    """What the table shows: the fastest strategy beside ddp, test errors, divergence and deaths, a line each."""
    rows = [row for row in rows if row["strategy"] != "single"]
    lines = []
    against = [row for row in rows if row["ratio_to_ddp"] is not None and row["strategy"] != "ddp"]
    if against:
        best = max(against, key=lambda row: row["ratio_to_ddp"])
        lines.append(f"speed: {_name(best)} trains {best['ratio_to_ddp']:.2f} times as many samples a second as ddp")
    known = sorted((row for row in rows if row["test_error_pct"] is not None), key=lambda row: row["test_error_pct"])
    if len(known) > 1:
        errors = ", ".join(f"{_name(row)} {row['test_error_pct']:.1f} %" for row in known)
        lines.append(f"test error after equally many steps, one seed: {errors}")
    lines += [f"{_name(row)} diverged: take a smaller --lr" for row in rows if row["loss_last"] is None]
    left_out = [row for row in rows if row.get("num_nonfinite") and row["loss_last"] is not None]
    lines += [f"{_name(row)}: {row['num_nonfinite']} steps of a learner were not finite, left out" for row in left_out]
    lines += [_death(row, death) for row in rows for death in row.get("deaths", ())]
    return lines


def _death(row: dict[str, Any], death: dict[str, Any]) -> str:
    ids, left = " and ".join(map(str, death["lost"])), len(death["members"])
    when = "" if death["step"] is None else f" at step {death['step']}"
    return f"{_name(row)}: learner {ids} died{when}, {left} of {row['world_size']} are left"


def _name(row: dict[str, Any]) -> str:
    return row["strategy"] + (f" {row['topology']}" if row["topology"] else "")


_COLUMNS = {
    "strategy": _name,
    "test error %": number("test_error_pct"),
    "loss last": number("loss_last", "{:.3f}", "diverged"),
    "samples/s": number("samples_per_s", "{:,.0f}"),
    "vs ddp": number("ratio_to_ddp", "{:.2f}x"),
    "exposed ms": number("exposed_comm_ms"),
    "step ms p20/p50/p80": lambda row: spread(row["step_ms"]),
    "kB/step": lambda row: "-" if row["bytes_per_step"] is None else f"{row['bytes_per_step'] / 1000:,.1f}",
    "loss first": number("loss_first", "{:.3f}"),
    "consensus": number("consensus_distance", "{:.2e}"),
}
