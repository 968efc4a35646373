"""What the report shows of a result of ``benchmarks/bench_optim.py``: the times of whole optimizer steps."""

from typing import Any

from rich.table import Table

from ddpcore.bench.command import Results, bars
from ddpcore.display.chart import Chart, Series
from ddpcore.display.table import MISSING, Cell, Row, number, spread, table_of


def parts(result: dict[str, Any]) -> list[Table | str]:
    """The machine, notes, a table of the ratios, and one of the bandwidths of ddpcore's steps."""
    here, rows = result["environment"], result["rows"]
    versions = f"torch {here['torch']}, ddpcore {here['ddpcore']} ({here['commit'] or 'installed'})"
    machine = f"{here['device']}, {here['threads']} of {here['cores']} cores; {versions}; {here['dtype']}"
    apart = sum(row["ms"]["p80"] > 2 * row["ms"]["p20"] for row in rows)
    doubt = f"busy machine: in {apart} of {len(rows)} rows the p80 is more than twice the p20, and a ratio says little"
    titles = {about["list"]: about["title"] for about in result["lists"]}
    columns: dict[str, Cell] = {
        "step": lambda row: row["implementation"],
        "list": lambda row: titles[row["list"]],
        "ms p20/p50/p80": lambda row: spread(row["ms"], ".4g"),
        "B/param": lambda row: " to ".join(dict.fromkeys(str(row["bytes_per_param" + x]) for x in ("", "_uncached"))),
        "GB/s": number("gb_per_s", "{:.1f}"),
        "copy GB/s": number("copy_gb_per_s", "{:.1f}"),
        "of copy": lambda row: f"{row['gb_per_s'] / row['copy_gb_per_s']:.0%}",
    }
    title = "ddpcore's steps, in their first comparison: bandwidth for the least possible traffic, beside a copy's"
    speeds = table_of(columns, _own_steps(result), title=title, left=("step", "list"))
    return [machine, *here["notes"], *[doubt] * bool(apart), _ratios(result), speeds]


def _ratios(result: dict[str, Any]) -> Table:
    """A line for each comparison, and a column for each list of parameters."""
    found = {(row["comparison"], row["list"], row["implementation"]): row for row in result["rows"]}

    def cell(line: Row, about: Row) -> str:
        left, right = (found.get((line["name"], about["list"], side)) for side in line["name"].split(" / ", 1))
        if left is None or right is None:
            return MISSING
        return f"{spread(left['ratio'])} ({left['ms']['p50']:.4g} / {right['ms']['p50']:.4g})"

    columns: dict[str, Cell] = {"left / right": lambda line: line["name"]}
    for about in result["lists"]:
        heading = f"{about['title']}: {about['parameters']:,} in {about['num_tensors']}"
        columns[heading] = lambda line, about=about: cell(line, about)  # type: ignore[misc]
    title = "time of a step, left / right: p20/p50/p80 of pairs, and the medians in ms"
    return table_of(columns, [{"name": name} for name in result["comparisons"]], title=title, left=("left / right",))


def _own_steps(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of ddpcore's steps: one for each step and parameter list, of their first comparison."""
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for row in result["rows"]:
        if row["bytes_per_param"] is not None:
            first.setdefault((row["implementation"], row["list"]), row)
    return [*first.values()]


def charts(result: dict[str, Any]) -> list[Chart]:
    """The charts of a result, as in the JSON file."""
    titles, own = {about["list"]: about["title"] for about in result["lists"]}, _own_steps(result)
    names = [f"{row['implementation']}, {titles[row['list']]}" for row in own]
    speeds = {"step": "gb_per_s", "copy": "copy_gb_per_s"}
    series = [Series(name=name, x=names, y=[row[key] for row in own]) for name, key in speeds.items()]
    left = [row for row in result["rows"] if row["comparison"].startswith(f"{row['implementation']} / ")]
    pairs = [f"{row['comparison']}, {titles[row['list']]}" for row in left]
    return [
        bars("Time of a step: left / right", "ratio", pairs, [row["ratio"] for row in left]),
        Chart(title="Bandwidth of a step, and of a copy", kind="bars", x_label="GB/s", series=series),
    ]


RESULTS = Results(lambda result: "comparisons" in result, "Optimizers", parts, charts)
