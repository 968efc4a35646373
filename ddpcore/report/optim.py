"""The optimizer bench's result as text: ratios by parameter list, then what our kernels move."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 150


def print_optimizers(result: dict[str, Any], console: Console | None = None) -> None:
    """Print the environment, a table of ratios, and a table of times and bandwidths of our own steps.

    Args:
        result: as in the JSON file.
        console: where to; standard output by default.
    """
    out = console or Console()
    if not out.is_terminal:  # a pipe or a file has no width to fit
        out = Console(file=out.file, width=WIDTH)
    environment = result["environment"]
    out.print(
        f"{environment['device']}, {environment['threads']} of {environment['cores']} cores; torch "
        f"{environment['torch']}, ddpcore {environment['ddpcore']} ({environment['commit'] or 'installed'}); "
        f"{environment['dtype']}",
        highlight=False,
        soft_wrap=True,
    )
    for note in environment["notes"]:
        out.print(note, highlight=False, markup=False, soft_wrap=True)
    out.print(_ratios(result))
    out.print(_bandwidths(result))


def _heading(about: dict[str, Any]) -> str:
    return f"{about['title']}\n{about['parameters']:,} in {about['num_tensors']}"


def _ratios(result: dict[str, Any]) -> Table:
    table = Table(
        title="time of a step, left / right: median of pairs, p20 to p80 in brackets; below it the medians in ms",
        title_justify="left",
        show_lines=True,
    )
    table.add_column("left / right", no_wrap=True)
    for about in result["lists"]:
        table.add_column(_heading(about), justify="right", no_wrap=True)
    found = {(row["comparison"], row["list"], row["implementation"]): row for row in result["rows"]}
    for comparison in result["comparisons"]:
        left, _, right = comparison.partition(" / ")
        cells = []
        for about in result["lists"]:
            pair = [found.get((comparison, about["list"], side)) for side in (left, right)]
            cells.append("-" if pair[0] is None or pair[1] is None else _cell(pair[0], pair[1]))
        table.add_row(comparison, *cells)
    return table


def _cell(left: dict[str, Any], right: dict[str, Any]) -> str:
    ratio = left["ratio"]
    times = " / ".join(f"{row['ms']['p50']:.4g}" for row in (left, right))
    return f"{ratio['p50']:.2f} [{ratio['p20']:.2f}-{ratio['p80']:.2f}]\n{times}"


def _bandwidths(result: dict[str, Any]) -> Table:
    table = Table(
        title="our own steps, as in their first comparison: bandwidth if traffic is the least, beside a copy",
        title_justify="left",
    )
    for heading in ("step", "list", "ms p20/p50/p80", "B/param", "GB/s", "copy GB/s", "of copy"):
        table.add_column(heading, justify="left" if heading in ("step", "list") else "right")
    titles = {about["list"]: about["title"] for about in result["lists"]}
    shown = set()
    for row in result["rows"]:
        key = row["implementation"], row["list"]
        if row["bytes_per_param"] is None or key in shown:
            continue
        shown.add(key)
        least, most = row["bytes_per_param"], row["bytes_per_param_uncached"]
        table.add_row(
            row["implementation"],
            titles[row["list"]],
            "/".join(f"{row['ms'][q]:.4g}" for q in ("p20", "p50", "p80")),
            f"{least}" if least == most else f"{least} to {most}",
            f"{row['gb_per_s']:.1f}",
            f"{row['copy_gb_per_s']:.1f}",
            f"{row['gb_per_s'] / row['copy_gb_per_s']:.0%}",
        )
    return table
