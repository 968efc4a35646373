"""The optimizer bench as two tables: ratios by parameter list, and the bandwidth of ddpcore's own steps."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ddpcore.report.table import cell_of, interval, number, print_parts, spread, table_of


def print_optimizers(result: dict[str, Any], console: Console | None = None) -> None:
    """Print a result (as in the JSON file): the environment, ratios, and times and bandwidths of ddpcore's steps."""
    print_parts(console, *optimizer_parts(result))


def optimizer_parts(result: dict[str, Any]) -> list[Table | str]:
    """What :func:`print_optimizers` prints."""
    environment = result["environment"]
    machine = (
        f"{environment['device']}, {environment['threads']} of {environment['cores']} cores; torch "
        f"{environment['torch']}, ddpcore {environment['ddpcore']} ({environment['commit'] or 'installed'}); "
        f"{environment['dtype']}"
    )
    return [machine, *environment["notes"], _ratios(result), _bandwidths(result)]


def _ratios(result: dict[str, Any]) -> Table:
    table = Table(
        title="time of a step, left / right: median of pairs, p20 to p80 in brackets; below it the medians in ms",
        title_justify="left",
        show_lines=True,
    )
    table.add_column("left / right", no_wrap=True)
    for about in result["lists"]:
        heading = f"{cell_of(about['title'])}\n{about['parameters']:,} in {about['num_tensors']}"
        table.add_column(heading, justify="right", no_wrap=True)
    found = {(row["comparison"], row["list"], row["implementation"]): row for row in result["rows"]}
    for comparison in result["comparisons"]:
        left, _, right = comparison.partition(" / ")
        cells = []
        for about in result["lists"]:
            pair = [found.get((comparison, about["list"], side)) for side in (left, right)]
            cells.append("-" if pair[0] is None or pair[1] is None else _cell(pair[0], pair[1]))
        table.add_row(cell_of(comparison), *map(escape, cells))
    return table


def _cell(left: dict[str, Any], right: dict[str, Any]) -> str:
    times = " / ".join(f"{row['ms']['p50']:.4g}" for row in (left, right))
    return f"{interval(left['ratio'], separator='-')}\n{times}"


def _bandwidths(result: dict[str, Any]) -> Table:
    """A line for each of ddpcore's steps and each parameter list, with the times of its first comparison."""
    titles = {about["list"]: about["title"] for about in result["lists"]}
    title = "ddpcore's steps, in their first comparison: bandwidth for the least possible traffic, and that of a copy"
    columns = {
        "step": lambda row: row["implementation"],
        "list": lambda row: titles[row["list"]],
        "ms p20/p50/p80": lambda row: spread(row["ms"], ".4g"),
        "B/param": _traffic,
        "GB/s": number("gb_per_s", "{:.1f}"),
        "copy GB/s": number("copy_gb_per_s", "{:.1f}"),
        "of copy": lambda row: f"{row['gb_per_s'] / row['copy_gb_per_s']:.0%}",
    }
    return table_of(columns, own_steps(result), title=title, left=("step", "list"))


def own_steps(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of ddpcore's steps: one for each step and parameter list, of their first comparison."""
    own = [row for row in result["rows"] if row["bytes_per_param"] is not None]
    first = {(row["implementation"], row["list"]): row for row in reversed(own)}
    return [row for row in own if first[row["implementation"], row["list"]] is row]


def _traffic(row: dict[str, Any]) -> str:
    least, most = row["bytes_per_param"], row["bytes_per_param_uncached"]
    return f"{least}" if least == most else f"{least} to {most}"
