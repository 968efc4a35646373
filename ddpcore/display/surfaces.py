"""Landscapes as charts, and their pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ddpcore.display.chart import Chart, Series, check_plot, finite
from ddpcore.options.typed import check_choice
from ddpcore.records.surface import Array, Surface


def plot_surfaces(surfaces: Mapping[str, Surface], path: Path, *, metric: str = "train_loss") -> None:
    """Draw contours of surfaces with the same scale of colours. The same surfaces give the same file.

    Args:
        surfaces: by title.
        path: passes :func:`check_plot`.
        metric: a metric of the surfaces, or ``ratio`` for ``|min_eig / max_eig|``.

    Raises:
        ValueError: an unknown metric, or a surface without finite values.
    """
    check_plot(path)
    from ddpcore.display.picture import plot_charts  # noqa: PLC0415  check_plot has found matplotlib

    charts = surface_charts(surfaces, metric)
    if len(charts) < len(surfaces):
        raise ValueError(f"no point of the landscape has a finite {metric}: there is nothing to draw")
    plot_charts(charts, path, "")


def surface_charts(surfaces: Mapping[str, Surface], metric: str) -> list[Chart]:
    """A contour chart of each surface that has finite values, with the same levels, see :func:`plot_surfaces`."""
    found = {}
    for title, surface in surfaces.items():
        if metric != "ratio":
            check_choice("metric", metric, [*surface.values, "ratio"])
        values = surface.ratio() if metric == "ratio" else surface.values[metric]
        if np.isfinite(values).any():
            found[title] = values
    levels = levels_of(list(found.values())).tolist() if found else []
    return [_contour(title, surfaces[title], values, levels) for title, values in found.items()]


def levels_of(surfaces: Sequence[Array]) -> Array:
    """Contour levels for values with finite ones: in equal ratios if they are positive and differ much, else steps."""
    known = np.concatenate([values[np.isfinite(values)] for values in surfaces])
    low, high = float(known.min()), float(known.max())
    if high <= low:
        return np.asarray([low, low + 1.0])
    if low > 0 and high / low > 20:
        return np.geomspace(low, high, 16)
    return np.linspace(low, high, 16)


def _contour(title: str, surface: Surface, values: Array, levels: Sequence[float]) -> Chart:
    x, y = surface.x.tolist(), surface.y.tolist()
    series = [Series(name=f"{at:.4g}", x=x, y=[*map(finite, row)]) for at, row in zip(y, values.tolist(), strict=True)]
    if surface.marks:
        marks = [*zip(*surface.marks.values(), strict=True)]
        series.append(Series(name="models", x=marks[0], y=marks[1], text=list(surface.marks), style="names"))
    note = f"{surface.about[:1].upper()}{surface.about[1:]}." if surface.about else ""
    if not surface.done.all():
        note += f" {int(surface.done.sum())} of {surface.done.size} points are computed."
    return Chart(
        title=title, kind="contour", x_label="x", y_label="y", series=series, rows=y, levels=levels, note=note.strip()
    )
