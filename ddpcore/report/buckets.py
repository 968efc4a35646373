"""The sweep of bucket sizes as text: a line a size, and which to take."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.table import Table

from ddpcore.report.table import print_environment

WIDTH = 150


def size_name(mb: float | None) -> str:
    """A bucket size as people say it; what is infinite, or not in JSON, is one bucket."""
    return "one bucket" if mb is None or math.isinf(mb) else f"{mb:g} MiB"


def print_buckets(result: dict[str, Any], console: Console | None = None) -> None:
    """Print the environment, a line a strategy and size, and last the line that starts with ``recommended``.

    Args:
        result: as in the JSON file.
        console: where to; standard output by default.
    """
    out = console or Console()
    if not out.is_terminal:  # a pipe or a file has no width to fit
        out = Console(file=out.file, width=WIDTH)
    print_environment(result["environment"], out)
    table = Table(
        title=f"{result['model']}, {result['world_size']} ranks, global batch {result['batch_size']}, "
        f"{result['rounds']} rounds in turn",
        title_justify="left",
    )
    for heading in _COLUMNS:
        table.add_column(heading, justify="left" if heading == "strategy" else "right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(*(cell(row) for cell in _COLUMNS.values()))
    out.print(table)
    out.print(recommendation(result["recommended"]), highlight=False, markup=False, soft_wrap=True)


def recommendation(recommended: list[dict[str, Any]]) -> str:
    """One line for all strategies."""
    return "recommended: " + "; ".join(_advice(one) for one in recommended)


def _advice(one: dict[str, Any]) -> str:
    default, noise = size_name(one["default_mb"]), f"the noise of {one['noise_pct']:.1f} %"
    if one["beyond_noise"]:
        faster = f"{one['margin_pct']:.1f} % faster than the default {default}, beyond {noise}"
        return f"{one['strategy']} {size_name(one['bucket_mb'])} ({faster})"
    if one["fastest_mb"] == one["default_mb"]:
        return f"{one['strategy']} {default} (the default, and the fastest)"
    margin = f"{size_name(one['fastest_mb'])} was {one['margin_pct']:.1f} % faster, within {noise}"
    return f"{one['strategy']} {default} (the default; {margin})"


def _sizes(num_bytes: list[int]) -> str:
    return f"{len(num_bytes)} up to {max(num_bytes) / 2**20:.3g}"


_COLUMNS = {
    "strategy": lambda row: row["strategy"],
    "largest bucket": lambda row: size_name(row["bucket_mb"]),
    "built, MiB": lambda row: _sizes(row["bucket_bytes"]),
    "sent, MiB": lambda row: _sizes(row["sent_bytes"]),
    "step ms p20/p50/p80": lambda row: "/".join(f"{row['step_ms'][q]:.2f}" for q in ("p20", "p50", "p80")),
    "comm alone ms": lambda row: f"{row['comm_ms']:.2f}",
    "exposed ms": lambda row: f"{row['exposed_comm_ms']:.2f}",
    "hidden": lambda row: f"{row['overlap_pct']:.0f} %",
    "peak MB": lambda row: "-" if row["peak_memory_mb"] is None else f"{row['peak_memory_mb']:.0f}",
}
