"""Predicted and measured step times as text, and whether gossip pays."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from ddpcore.report.buckets import size_name
from ddpcore.report.table import print_environment

WIDTH = 130


def print_predictions(result: dict[str, Any], console: Console | None = None) -> None:
    """Print the environment, a line a strategy, how far off the predictions are, and whether gossip pays.

    Args:
        result: as in the JSON file.
        console: where to; standard output by default.
    """
    out = console or Console()
    if not out.is_terminal:  # a pipe or a file has no width to fit
        out = Console(file=out.file, width=WIDTH)
    print_environment(result["environment"], out)
    parts = result["compute_ms"]
    table = Table(
        title=f"{result['model']}, {result['world_size']} ranks, global batch {result['batch_size']}: without "
        f"communication forward {parts['forward']:.2f} + backward {parts['backward']:.2f} + update "
        f"{parts['update']:.2f} ms",
        title_justify="left",
    )
    for heading in _COLUMNS:
        table.add_column(heading, justify="left" if heading in ("strategy", "transport") else "right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(*(cell(row) for cell in _COLUMNS.values()))
    out.print(table)
    for line in (accuracy(result["rows"]), verdict(result["rows"])):
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def accuracy(rows: list[dict[str, Any]]) -> str:
    """How far off the predictions are, in one line."""
    errors = [abs(row["error_pct"]) for row in rows]
    worst = rows[errors.index(max(errors))]
    return f"prediction error: median {median(errors):.1f} %, worst {max(errors):.1f} % ({_what(worst)})"


def verdict(rows: list[dict[str, Any]]) -> str:
    """Whether the fastest strategy that averages weights beats the fastest that averages gradients, in one line."""
    synchronous = [row for row in rows if row["strategy"] == "ssgd"]
    others = [row for row in rows if row["strategy"] != "ssgd"]
    if not synchronous or not others:
        return "will it pay: name ssgd and another strategy to compare"
    ratios = []
    for key in (lambda row: row["predicted_ms"], lambda row: row["measured_ms"]["p50"]):
        best = min(others, key=key)
        ratios.append((key(best) / key(min(synchronous, key=key)), best))
    (predicted, expected), (measured, fastest) = ratios
    return (
        f"will it pay: predicted {_what(expected)} takes {predicted:.2f} of ssgd's step, "
        f"measured {_what(fastest)} takes {measured:.2f}"
    )


def _what(row: dict[str, Any]) -> str:
    words = [row["strategy"], row["topology"], row["num_buckets"] and size_name(row["bucket_mb"]), row["transport"]]
    return " ".join(word for word in words if word)


_COLUMNS = {
    "strategy": lambda row: f"{row['strategy']} {row['topology'] or ''}".rstrip(),
    "transport": lambda row: row["transport"] or "-",
    "buckets": lambda row: (
        "-" if row["num_buckets"] is None else f"{row['num_buckets']} ({size_name(row['bucket_mb'])})"
    ),
    "comm alone ms": lambda row: f"{row['comm_ms']:.2f}",
    "predicted ms": lambda row: f"{row['predicted_ms']:.2f}",
    "measured ms p20/p50/p80": lambda row: "/".join(f"{row['measured_ms'][q]:.2f}" for q in ("p20", "p50", "p80")),
    "error": lambda row: f"{row['error_pct']:+.1f} %",
}
