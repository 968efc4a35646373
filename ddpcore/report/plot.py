"""Plots as PNG or SVG files; they need matplotlib (extra ``report``)."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpcore.report.chart import COLORS, Chart
from ddpcore.report.plot_option import check_plot
from ddpcore.report.static_chart import draw, height_of
from ddpcore.report.study_charts import study_charts

try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError:  # the extra `report`: only --plot needs it
    Figure = None  # type: ignore[assignment,misc]

ROWS_A_LINE = 6
NETWORKS_A_LINE = 3
CURVES = {"effective_lr": "effective / learning rate", "loss": "training loss of the mean", "noise": "noise strength"}


def plot_comparison(comparison: dict[str, Any], path: Path, run_labels: list[str]) -> None:
    """Plot the study's first metric: lines over the variable of its question, and a list of the other rows.

    See :func:`ddpcore.report.study_charts.study_charts`. The curves of runs, if there are any, follow below with
    ROWS_A_LINE rows in each line of panels: the median over seeds, shaded from the 20th to the 80th percentile.
    The same comparison gives the same file.

    Args:
        comparison: of one study, as ``ddpcore.report.compare.compare`` returns it.
        path: passes :func:`check_plot`.
        run_labels: for the legend.
    """
    check_plot(path)
    charts = study_charts(comparison, run_labels)
    panels = [
        (label, list(curves)[first : first + ROWS_A_LINE], curves)
        for label, curves in zip(run_labels, comparison["curves"], strict=True)
        for first in range(0, len(curves), ROWS_A_LINE)
    ]
    heights = [*map(height_of, charts), *[3.0] * len(panels)]
    figure = Figure(figsize=(12 if panels else 9, 0.5 + sum(heights)), layout="constrained")
    figure.suptitle(comparison["title"], fontsize="medium")
    grid = figure.add_gridspec(len(heights), len(CURVES), height_ratios=heights)
    for line, chart in enumerate(charts):
        axes = figure.add_subplot(grid[line, :])
        draw(axes, chart)
        axes.set_title(chart.note or chart.title, fontsize="small", loc="right", pad=4)
    for line, (label, rows, curves) in enumerate(panels, start=len(charts)):
        for column, (name, title) in enumerate(CURVES.items()):
            axes = figure.add_subplot(grid[line, column])
            axes.set_prop_cycle(color=COLORS)
            for row in rows:
                _draw_curves(axes, curves[row], name, row)
            axes.set(xlabel="step", ylabel=title, yscale="linear" if name == "effective_lr" else "log")
            axes.grid(alpha=0.3)
            if name == next(iter(CURVES)):
                axes.legend(fontsize="x-small", title=label if len(run_labels) > 1 else None)
    save(figure, path)


def _draw_curves(axes: Any, seeds: list[dict[str, list[float]]], name: str, row: str) -> None:
    """Draw the median over the seeds that reached a step, and the range from the 20th to the 80th percentile."""
    points: dict[float, list[float]] = {}
    for curve in seeds:
        for step, value in zip(curve["step"], curve[name], strict=True):
            points.setdefault(step, []).append(value)
    steps = sorted(points)
    (line,) = axes.plot(steps, [statistics.median(points[step]) for step in steps], label=row, linewidth=1)
    low, high = zip(*(_middle(points[step]) for step in steps), strict=True)
    axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def _middle(values: list[float]) -> tuple[float, float]:
    """The 20th and 80th percentile."""
    cuts = statistics.quantiles(values, n=5, method="inclusive") if len(values) > 1 else values
    return cuts[0], cuts[-1]


def plot_charts(charts: Sequence[Chart], path: Path, title: str) -> None:
    """Draw charts below each other; drawings of networks stand side by side. The same charts give the same file.

    Args:
        charts: at least one.
        path: passes :func:`check_plot`.
        title: stands above several charts.
    """
    check_plot(path)
    lines: list[list[Chart]] = []
    for chart in charts:
        if chart.kind == "network" and lines and lines[-1][0].kind == "network" and len(lines[-1]) < NETWORKS_A_LINE:
            lines[-1].append(chart)
        else:
            lines.append([chart])
    heights = [height_of(line[0]) for line in lines]
    figure = Figure(figsize=(9, 0.5 + sum(heights)), layout="constrained")
    if len(charts) > 1:
        figure.suptitle(title, fontsize="medium")
    grid = figure.add_gridspec(len(lines), NETWORKS_A_LINE, height_ratios=heights)
    for number, line in enumerate(lines):
        for column, chart in enumerate(line):
            axes = figure.add_subplot(grid[number, column if chart.kind == "network" else slice(None)])
            draw(axes, chart)
            axes.set_title(chart.title, fontsize="small")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write the whole file, or nothing."""
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        with matplotlib.rc_context({"svg.hashsalt": "ddpcore"}):
            figure.savefig(partial, metadata={"Date": None} if path.suffix == ".svg" else None)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
