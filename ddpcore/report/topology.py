"""Topologies as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from ddpcore.report.table import output, print_lines, table_of


def print_topologies(result: dict[str, Any], console: Console | None = None) -> None:
    """Print a line for each topology, and then the topologies that do not fit the number of learners.

    Args:
        result: as in the JSON file.
        console: standard output by default.
    """
    out = output(console)
    title = f"{result['world_size']:,} learner" + ("s" if result["world_size"] != 1 else "")
    out.print(table_of(_COLUMNS, result["rows"], title=title, left=("topology",)))
    print_lines(out, *(f"{row['topology']}: {row['reason']}" for row in result["refused"]))


def _smallest(row: dict[str, Any]) -> str:
    value = row["smallest_eigenvalue"]
    return "-" if value is None else f"{value:.3f}".replace("-0.000", "0.000")


_COLUMNS = {
    "topology": lambda row: row["topology"],
    "period": lambda row: "random" if row["period"] is None else str(row["period"]),
    "edges": lambda row: f"{row['num_edges']:,}",
    "degree min/mean/max": lambda row: f"{row['degree_min']}/{row['degree_mean']:.4g}/{row['degree_max']}",
    "messages/step": lambda row: f"{row['messages_per_step']:,.6g}",
    "models sent/step": lambda row: f"{row['models_sent_per_step']:.4g}",
    "spectral gap": lambda row: f"{row['spectral_gap']:.4g}",
    "mixing time": lambda row: "never" if row["mixing_time"] is None else f"{row['mixing_time']:,.0f}",
    "doubly stochastic": lambda row: "yes" if row["doubly_stochastic"] else "push-sum",
    "smallest eigenvalue": _smallest,
}
