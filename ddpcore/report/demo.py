"""The demo's result as a table and as a chart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from ddpcore.report.chart import Chart, Series
from ddpcore.report.table import print_parts, table_of

NAMES = {"ssgd": "SSGD: averages gradients", "dpsgd": "DPSGD: averages weights"}


def print_demo(result: dict[str, Any], console: Console | None = None) -> None:
    """Print a line for each learning rate and strategy, and what it shows."""
    print_parts(console, *demo_parts(result))


def demo_parts(result: dict[str, Any]) -> list[Table | str]:
    """What :func:`print_demo` prints."""
    title = (
        f"{result['learners']} learners x {result['batch_size']} handwritten digits, {result['steps']} steps, "
        f"{result['seeds']} seeds"
    )
    return [table_of(_COLUMNS, result["rows"], title=title, left=("strategy",), group="lr"), seen(result)]


def seen(result: dict[str, Any]) -> str:
    """At how many of the runs each strategy failed, by learning rate, in one sentence."""
    rows = {(row["lr"], row["strategy"]): row["num_failed"] for row in result["rows"]}
    gaps = {lr: rows[lr, "ssgd"] - rows[lr, "dpsgd"] for lr, _ in rows}
    lr = max(gaps, key=lambda lr: gaps[lr])
    if gaps[lr] <= 0:
        return "No learning rate here separates the two strategies."
    return (
        f"At learning rate {lr:g}, {rows[lr, 'ssgd']} of {result['seeds']} runs of SSGD fail (test error above "
        f"{result['failed_above_pct']:g} %), and {rows[lr, 'dpsgd']} of DPSGD: it averages weights, not gradients."
    )


def demo_charts(result: dict[str, Any]) -> list[Chart]:
    """The test error of each run over the learning rate, and a line through the medians."""
    series = []
    for strategy, color in (("ssgd", 1), ("dpsgd", 0)):
        rows = [row for row in result["rows"] if row["strategy"] == strategy]
        medians = Series(name=NAMES[strategy], x=[row["lr"] for row in rows], y=[row["median_pct"] for row in rows])
        runs = [(row["lr"], error) for row in rows for error in row["test_error_pct"]]
        points = Series(
            name=f"{strategy}, a run", x=[lr for lr, _ in runs], y=[error for _, error in runs], style="points"
        )
        series += [replace(medians, color=color), replace(points, color=color, group=medians.name)]
    title = f"{result['learners']} learners, handwritten digits: each run, and the median"
    return [Chart(title=title, x_label="learning rate", y_label="test error, %", series=series, log_y=True)]


_COLUMNS = {
    "learning rate": lambda row: f"{row['lr']:g}",
    "strategy": lambda row: row["strategy"],
    "test error %, median": lambda row: f"{row['median_pct']:.1f}",
    "best to worst": lambda row: f"{min(row['test_error_pct']):.1f} to {max(row['test_error_pct']):.1f}",
    "failed": lambda row: f"{row['num_failed']} of {len(row['test_error_pct'])}",
}
