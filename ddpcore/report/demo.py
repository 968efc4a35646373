"""The demo's result as a table and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ddpcore.report.plot import Figure, save
from ddpcore.report.table import print_parts, table_of

COLORS = {"ssgd": "#D55E00", "dpsgd": "#0072B2"}  # Okabe and Ito 2008: seen apart by colour-blind readers too
MARKERS = {"ssgd": "s", "dpsgd": "o"}
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
    table = table_of(_COLUMNS, result["rows"], title=title, left=("strategy",), group="lr")
    return [table, seen(result)]


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


def plot_demo(result: dict[str, Any], path: Path) -> None:
    """Draw the test error of every run over the learning rate, and a line through the medians."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for strategy, color in COLORS.items():
        rows = [row for row in result["rows"] if row["strategy"] == strategy]
        lrs = [row["lr"] for row in rows]
        axes.plot(lrs, [row["median_pct"] for row in rows], color=color, linewidth=2, label=NAMES[strategy])
        for row in rows:
            errors = row["test_error_pct"]
            axes.plot([row["lr"]] * len(errors), errors, MARKERS[strategy], color=color, alpha=0.5, markersize=5)
    axes.set(xlabel="learning rate", ylabel="test error, %", yscale="log")
    axes.set_yticks([1, 3, 10, 30, 90], ["1", "3", "10", "30", "90"])
    axes.set_title(f"{result['learners']} learners, handwritten digits: each run, and the median", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save(figure, path)


_COLUMNS = {
    "learning rate": lambda row: f"{row['lr']:g}",
    "strategy": lambda row: row["strategy"],
    "test error %, median": lambda row: f"{row['median_pct']:.1f}",
    "best to worst": lambda row: f"{min(row['test_error_pct']):.1f} to {max(row['test_error_pct']):.1f}",
    "failed": lambda row: f"{row['num_failed']} of {len(row['test_error_pct'])}",
}
