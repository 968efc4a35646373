"""Predicted and measured step times as a table, and whether averaging weights is faster than gradients."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from ddpcore.report.table import environment_lines, number, print_parts, size_name, spread, table_of


def print_predictions(result: dict[str, Any], console: Console | None = None) -> None:
    """Print a result (as in the JSON file): the environment, a line for each case, the errors, and the verdict."""
    print_parts(console, *prediction_parts(result))


def prediction_parts(result: dict[str, Any]) -> list[Table | str]:
    """What :func:`print_predictions` prints."""
    parts = result["compute_ms"]
    title = (
        f"{result['model']}, {result['world_size']} ranks, global batch {result['batch_size']}: without "
        f"communication forward {parts['forward']:.2f} + backward {parts['backward']:.2f} + update "
        f"{parts['update']:.2f} ms"
    )
    rows = result["rows"]
    table = table_of(_COLUMNS, rows, title=title, left=("strategy", "transport"))
    return [*environment_lines(result["environment"]), table, accuracy(rows), verdict(rows)]


def accuracy(rows: list[dict[str, Any]]) -> str:
    """The median and the largest error of the predictions, in one line."""
    errors = [abs(row["error_pct"]) for row in rows]
    worst = rows[errors.index(max(errors))]
    return f"prediction error: median {median(errors):.1f} %, worst {max(errors):.1f} % ({case_name(worst)})"


def verdict(rows: list[dict[str, Any]]) -> str:
    """Whether averaging weights is faster than averaging gradients, predicted and measured for the same two cases.

    The cases are those of each side with the smallest predicted time. If others were measured as faster, it says so.
    """
    gradients = [row for row in rows if row["strategy"] == "ssgd"]
    weights = [row for row in rows if row["strategy"] != "ssgd"]
    if not gradients or not weights:
        return "will it pay: name ssgd and another strategy to compare"
    keys = (lambda row: row["predicted_ms"], lambda row: row["measured_ms"]["p50"])
    (ours, theirs), fastest = [[min(side, key=key) for side in (weights, gradients)] for key in keys]
    predicted, measured = (key(ours) / key(theirs) for key in keys)
    line = (
        f"will it pay: a step of {case_name(ours)} takes {predicted:.2f} of the time of {case_name(theirs)} as "
        f"predicted, and {measured:.2f} as measured"
    )
    if fastest != [ours, theirs]:
        line += f"; the fastest as measured are {case_name(fastest[0])} and {case_name(fastest[1])}: "
        line += f"{keys[1](fastest[0]) / keys[1](fastest[1]):.2f}"
    return line


def case_name(row: dict[str, Any]) -> str:
    """Strategy, topology, buckets and transport of a row."""
    words = [row["strategy"], row["topology"], row["num_buckets"] and size_name(row["bucket_mb"]), row["transport"]]
    return " ".join(word for word in words if word)


_COLUMNS = {
    "strategy": lambda row: f"{row['strategy']} {row['topology'] or ''}".rstrip(),
    "transport": lambda row: row["transport"] or "-",
    "buckets": lambda row: (
        "-" if row["num_buckets"] is None else f"{row['num_buckets']} ({size_name(row['bucket_mb'])})"
    ),
    "comm alone ms": number("comm_ms"),
    "predicted ms": number("predicted_ms"),
    "measured ms p20/p50/p80": lambda row: spread(row["measured_ms"]),
    "error": number("error_pct", "{:+.1f} %"),
}
