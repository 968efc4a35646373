"""Topologies as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ddpcore.report.table import number, print_parts, table_of


def print_topologies(result: dict[str, Any], console: Console | None = None) -> None:
    """Print a line for each topology in a result (as in the JSON file), then those that do not fit so many learners."""
    print_parts(console, *topology_parts(result))


def topology_parts(result: dict[str, Any]) -> list[Table | str]:
    """What :func:`print_topologies` prints."""
    title = f"{result['world_size']:,} learner" + ("s" if result["world_size"] != 1 else "")
    refused = (f"{row['topology']}: {row['reason']}" for row in result["refused"])
    return [table_of(_COLUMNS, result["rows"], title=title, left=("topology",)), *refused]


_COLUMNS = {
    "topology": lambda row: row["topology"],
    "messages/step": number("messages_per_step", "{:,.6g}"),
    "models sent/step": number("models_sent_per_step", "{:.4g}"),
    "spectral gap": number("spectral_gap", "{:.4g}"),
    "mixing time": number("mixing_time", "{:,.0f}", "never"),
    "doubly stochastic": lambda row: "yes" if row["doubly_stochastic"] else "push-sum",
    "period": number("period", "{}", "random"),
    "edges": number("num_edges", "{:,}"),
    "degree min/mean/max": lambda row: f"{row['degree_min']}/{row['degree_mean']:.4g}/{row['degree_max']}",
    "smallest eigenvalue": lambda row: number("smallest_eigenvalue", "{:.3f}")(row).replace("-0.000", "0.000"),
}
