"""Topologies as text: a line each."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 150


def print_topologies(result: dict[str, Any], console: Console | None = None) -> None:
    """Print a table of topologies, and below it which do not fit so many learners.

    Args:
        result: as in the JSON file.
        console: where to; standard output by default.
    """
    out = console or Console()
    if not out.is_terminal:  # a pipe or a file has no width to fit
        out = Console(file=out.file, width=WIDTH)
    learners = f"{result['world_size']:,} learner" + ("s" if result["world_size"] != 1 else "")
    table = Table(title=learners, title_justify="left")
    for heading in _COLUMNS:
        table.add_column(heading, justify="left" if heading == "topology" else "right", no_wrap=heading == "topology")
    for row in result["rows"]:
        table.add_row(*(cell(row) for cell in _COLUMNS.values()))
    out.print(table)
    for row in result["refused"]:
        out.print(f"{row['topology']}: {row['reason']}", highlight=False, markup=False, soft_wrap=True)


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
