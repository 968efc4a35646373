"""Sections of the page about curvature: the Hessian along runs, and landscapes of their final models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddpcore.display.chart import Chart, Number, Series, finite
from ddpcore.display.surfaces import surface_charts
from ddpcore.records.surface import Surface
from ddpcore.report.section import Section, TableData
from ddpcore.report.sources import Run

RISE = 0.1  # of the loss, for the width of a level set
_METRICS = {"train_loss": "Loss", "ratio": "|Smallest / largest eigenvalue|"}


def curvature_sections(runs: Sequence[Run], colors: Sequence[int]) -> list[Section]:
    """The Hessian along the runs, and their landscapes, with one scale of colours for each plane and metric."""
    return [_hessian(runs, colors), _landscapes(runs)]


def _hessian(runs: Sequence[Run], colors: Sequence[int]) -> Section:
    def chart(title: str, y_label: str, value: Callable[[dict[str, Any]], Number], note: str = "") -> Chart:
        series = []
        for run, color in zip(runs, colors, strict=True):
            points = [(line["step"], value(line)) for line in run.hessian]
            if any(found is not None for _, found in points):
                x, y = zip(*points, strict=True)
                series.append(Series(name=run.label, x=x, y=y, style="line+points", color=color))
        return Chart(title=title, x_label="step", y_label=y_label, series=series, note=note)

    alike = "The number that {} alike in all directions would have is 1 / P for each eigenvector, with P weights."
    charts = [
        chart("Largest eigenvalue of the Hessian", "largest eigenvalue", lambda line: _first(line.get("largest"))),
        chart("Smallest eigenvalue of the Hessian", "smallest eigenvalue", lambda line: finite(line.get("smallest"))),
        chart(
            "Disagreement along the top eigenvectors", "share of the squared distance from the mean",
            lambda line: _sum(line.get("disagreement")), alike.format("a disagreement"),
        ),
        chart(
            "Gradient noise along the top eigenvectors", "share of the squared noise",
            lambda line: _sum(line.get("noise_shares")), alike.format("a noise"),
        ),
    ]  # fmt: skip
    return Section(title="Hessian along the run", charts=[one for one in charts if one.series])


def _first(values: Any) -> Number:
    return finite(values[0]) if isinstance(values, list) and values else None


def _sum(values: Any) -> Number:
    numbers = [finite(value) for value in values] if isinstance(values, list) and values else [None]
    return None if None in numbers else sum(value for value in numbers if value is not None)


def _landscapes(runs: Sequence[Run]) -> Section:
    planes = sorted({stem for run in runs for stem in run.landscapes})
    found = {plane: {run.label: run.landscapes[plane] for run in runs if plane in run.landscapes} for plane in planes}
    charts = []
    for plane, surfaces in found.items():
        for metric, title in _METRICS.items():
            needed = {"min_eig", "max_eig"} if metric == "ratio" else {metric}
            having = {name: one for name, one in surfaces.items() if needed <= one.values.keys()}
            charts += surface_charts({f"{title}, {name}: {plane}": one for name, one in having.items()}, metric)
    lines = ["Pictures of one kind and one plane have the same scale of colours."] if len(charts) > 1 else []
    return Section(title="Landscapes", lines=lines, tables=[_table(found)] if found else [], charts=charts)


def _table(found: dict[str, dict[str, Surface]]) -> TableData:
    headings = ["landscape", "points", "lowest loss", "highest loss", f"radius of the set at lowest + {RISE:g}"]
    rows = []
    for name, surface in [(f"{name}: {plane}", one) for plane, own in found.items() for name, one in own.items()]:
        loss = surface.loss[np.isfinite(surface.loss)]
        row = [name, f"{int(surface.done.sum())} of {surface.done.size}"]
        numbers = [loss.min(), loss.max()] if loss.size else []
        numbers += [surface.level_radius(RISE)] if loss.size and surface.done.all() else []
        rows.append([*row, *(f"{value:.4g}" for value in numbers), *["-"] * (3 - len(numbers))])
    return TableData(title="", headings=headings, rows=rows)
