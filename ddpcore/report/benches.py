"""Sections of the page about bench results: the tables that the benches print, and charts of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from ddpcore.report.buckets import bucket_parts
from ddpcore.report.chart import Chart, Section, Series, TableData
from ddpcore.report.comm import comm_parts
from ddpcore.report.demo import demo_charts, demo_parts
from ddpcore.report.optim import optimizer_parts, own_steps
from ddpcore.report.plot import plot_charts
from ddpcore.report.predict import case_name, prediction_parts
from ddpcore.report.runs import MOST_DRAWN, network
from ddpcore.report.sources import Bench
from ddpcore.report.stats import stats_parts
from ddpcore.report.strategies import strategy_parts
from ddpcore.report.table import size_name
from ddpcore.report.topology import topology_parts
from ddpcore.storage.limits import plain, shown

Parts = Sequence[Table | str]


def bench_section(bench: Bench) -> Section:
    """The section of a bench result.

    Raises:
        ValueError: no bench writes such a result, or a part of it is missing.
    """
    result = bench.result
    kind = next((kind for kind in _KINDS if kind.knows(result)), None)
    if kind is None:
        raise ValueError(
            f"{shown(bench.name)} is not the result of a bench that this version knows: run the bench again"
        )
    try:
        return _section(f"{kind.title}: {bench.name}", kind.parts(result), kind.charts(result))
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{bench.name} is damaged or of another version ({plain(reason)}): run the bench again"
        ) from None


def plot_bench(result: dict[str, Any], path: Path) -> None:
    """Draw the charts of a bench result (as in the JSON file) into a PNG or SVG file.

    Raises:
        ValueError: see :func:`ddpcore.report.plot_option.check_plot`; or no row of the result has a number to draw.
    """
    kind = next(kind for kind in _KINDS if kind.knows(result))
    charts = _drawn(kind.charts(result))
    if not charts:
        raise ValueError(f"--plot: no row has a number to draw, so {shown(path)} is not written")
    plot_charts(charts, path, kind.title)


def _section(title: str, parts: Parts, charts: Sequence[Chart]) -> Section:
    captions = [_plain(part.caption) for part in parts if isinstance(part, Table) and part.caption]
    lines = [*(part for part in parts if isinstance(part, str)), *captions]
    tables = [table_data(part) for part in parts if isinstance(part, Table)]
    return Section(title=title, lines=lines, tables=tables, charts=_drawn(charts))


def _drawn(charts: Sequence[Chart]) -> list[Chart]:
    """The charts that have something to show."""
    return [chart for chart in charts if any(series.y for series in chart.series)]


def table_data(table: Table) -> TableData:
    """A table of the terminal as a table of the page."""
    cells = [[_plain(cell) for cell in column.cells] for column in table.columns]
    left = [column.justify == "left" for column in table.columns]
    return TableData(
        title=_plain(table.title or ""),
        headings=[_plain(column.header) for column in table.columns],
        rows=list(zip(*cells, strict=True)),
        num_left=left.index(False) if False in left else len(left),
    )


def _plain(cell: Any) -> str:
    return Text.from_markup(cell).plain if isinstance(cell, str) else str(cell)


def _bars(title: str, label: str, names: Sequence[str], quantiles: Sequence[Any]) -> Chart:
    """Bars of medians from p20 to p80; rows without numbers are left out."""
    found = [(name, values) for name, values in zip(names, quantiles, strict=True) if values is not None]
    low, middle, high = ([values[key] for _, values in found] for key in ("p20", "p50", "p80"))
    series = Series(name=label, x=[name for name, _ in found], y=middle, low=low, high=high)
    return Chart(title=title, kind="bars", x_label=f"{label}, median, p20 to p80", series=[series])


def _strategy_charts(result: dict[str, Any]) -> list[Chart]:
    rows = result["rows"]
    names = [f"{row['strategy']} {row['topology'] or ''}".strip() for row in rows]
    first = rows[0]["step_ms"]["p50"] if rows else None
    ratios = [row["step_ms"]["p50"] / first for row in rows] if first else []
    relative = Series(name="ratio", x=names, y=ratios)
    curves = [(name, row["curve"]) for name, row in zip(names, rows, strict=True) if row.get("curve")]
    losses = [
        Chart(
            title=f"Training loss over {key}",
            x_label=key,
            y_label="loss, mean of the learners",
            series=[Series(name=name, x=curve[key], y=curve["loss"], style="line+points") for name, curve in curves],
        )
        for key in ("steps", "seconds")
    ]
    return [
        *losses,
        _bars("Time of a step", "ms", names, [row["step_ms"] for row in rows]),
        Chart(title=f"Time of a step, relative to {names[0] if names else ''}", kind="bars", x_label="ratio of medians",
              series=[relative]),
    ]  # fmt: skip


def _comm_charts(result: dict[str, Any]) -> list[Chart]:
    charts = []
    for op in dict.fromkeys(row["op"] for row in result["rows"]):
        series = []
        rows = [row for row in result["rows"] if row["op"] == op]
        for transport in dict.fromkeys(row["transport"] for row in rows):
            mine = sorted((row for row in rows if row["transport"] == transport), key=lambda row: row["size_bytes"])
            x, y = [row["size_bytes"] for row in mine], [row["busbw_gb_per_s"] for row in mine]
            series.append(Series(name=transport, x=x, y=y, style="line+points"))
        charts.append(
            Chart(title=f"Bandwidth: {op}", x_label="bytes", y_label="bus bandwidth, GB/s", series=series, log_x=True)
        )
    return charts


def _optimizer_charts(result: dict[str, Any]) -> list[Chart]:
    titles = {about["list"]: about["title"] for about in result["lists"]}
    own = own_steps(result)
    names = [f"{row['implementation']}, {titles[row['list']]}" for row in own]
    mine = Series(name="step", x=names, y=[row["gb_per_s"] for row in own])
    copy = Series(name="copy", x=names, y=[row["copy_gb_per_s"] for row in own])
    left = [row for row in result["rows"] if row["comparison"].startswith(f"{row['implementation']} / ")]
    pairs = [f"{row['comparison']}, {titles[row['list']]}" for row in left]
    return [
        _bars("Time of a step: left / right", "ratio", pairs, [row["ratio"] for row in left]),
        Chart(title="Bandwidth of a step, and of a copy", kind="bars", x_label="GB/s", series=[mine, copy]),
    ]


def _bucket_charts(result: dict[str, Any]) -> list[Chart]:
    """A strategy has a gap at a size that was measured for another one alone, so that the sizes stay in order."""
    steps, comm = [], []
    sizes = sorted({row["bucket_mb"] for row in result["rows"]}, key=lambda mb: math.inf if mb is None else mb)
    x = [*map(size_name, sizes)]
    for number, strategy in enumerate(dict.fromkeys(row["strategy"] for row in result["rows"])):
        found = {row["bucket_mb"]: row for row in result["rows"] if row["strategy"] == strategy}
        rows = [found.get(size) for size in sizes]
        low, middle, high = ([row and row["step_ms"][key] for row in rows] for key in ("p20", "p50", "p80"))
        steps.append(Series(name=strategy, x=x, y=middle, low=low, high=high, style="line+points", color=number))
        for name, key in (("alone", "comm_ms"), ("exposed", "exposed_comm_ms")):
            y = [row and row[key] for row in rows]
            comm.append(Series(name=f"{strategy}, {name}", x=x, y=y, style="line+points"))
    return [
        Chart(title="Time of a step by bucket size", x_label="largest bucket", y_label="ms", series=steps),
        Chart(title="Communication by bucket size", x_label="largest bucket", y_label="ms", series=comm),
    ]


def _prediction_charts(result: dict[str, Any]) -> list[Chart]:
    names = [case_name(row) for row in result["rows"]]
    predicted = Series(name="predicted", x=names, y=[row["predicted_ms"] for row in result["rows"]])
    low, middle, high = ([row["measured_ms"][key] for row in result["rows"]] for key in ("p20", "p50", "p80"))
    measured = Series(name="measured", x=names, y=middle, low=low, high=high)
    return [Chart(title="Time of a step", kind="bars", x_label="ms", series=[predicted, measured])]


def _stats_charts(result: dict[str, Any]) -> list[Chart]:
    rows = result["rows"]
    return [
        _bars("Overhead of statistics", "%", [row["statistics"] for row in rows], [r["overhead_pct"] for r in rows])
    ]


def _topology_charts(result: dict[str, Any]) -> list[Chart]:
    rows = result["rows"]
    names = [row["topology"] for row in rows]
    gaps = Series(name="spectral gap", x=names, y=[row["spectral_gap"] for row in rows])
    drawings = [
        network(f"{row['topology']}, spectral gap {row['spectral_gap']:.4g}", row["num_learners"], row["edges"])
        for row in rows
        if row.get("edges") is not None and row["num_learners"] <= MOST_DRAWN
    ]
    return [Chart(title="Spectral gap", kind="bars", x_label="spectral gap", series=[gaps]), *drawings]


def _has(key: str) -> Callable[[dict[str, Any]], bool]:
    return lambda result: any(isinstance(row, dict) and key in row for row in result["rows"])


class _Kind(NamedTuple):
    """A kind of bench result: how to know it, its title, and what to show of it."""

    knows: Callable[[dict[str, Any]], bool]
    title: str
    parts: Callable[[dict[str, Any]], Parts]
    charts: Callable[[dict[str, Any]], Sequence[Chart]]


_KINDS = (
    _Kind(lambda result: "recommended" in result, "Bucket sizes", bucket_parts, _bucket_charts),
    _Kind(lambda result: "comparisons" in result, "Optimizers", optimizer_parts, _optimizer_charts),
    _Kind(lambda result: "compute_ms" in result, "Predicted step times", prediction_parts, _prediction_charts),
    _Kind(lambda result: "failed_above_pct" in result, "Handwritten digits", demo_parts, demo_charts),
    _Kind(_has("op"), "Operations over transports", comm_parts, _comm_charts),
    _Kind(_has("statistics"), "Cost of statistics", stats_parts, _stats_charts),
    _Kind(_has("spectral_gap"), "Topologies", topology_parts, _topology_charts),
    _Kind(_has("samples_per_s"), "Strategies", lambda result: strategy_parts(result, ""), _strategy_charts),
)
