"""Pictures of landscapes, drawn by matplotlib (extra ``report``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddpcore.display.chart import check_plot
from ddpcore.options.typed import check_choice
from ddpcore.records.surface import Array, Surface

KINDS = ("contour", "filled", "3d", "heat")


def plot_surfaces(
    surfaces: Mapping[str, Surface], path: Path, *, kind: str = "contour", metric: str = "train_loss"
) -> None:
    """Draw surfaces side by side, with the same scale of colours. The same surfaces give the same file.

    Args:
        surfaces: by title.
        path: passes :func:`check_plot`.
        kind: ``contour`` lines, ``filled`` contours, ``3d``, or ``heat``.
        metric: a metric of the surfaces, or ``ratio`` for ``|min_eig / max_eig|``.

    Raises:
        ValueError: an unknown kind or metric, or a surface without finite values.
    """
    check_choice("kind", kind, KINDS)
    check_plot(path)
    from matplotlib.figure import Figure  # noqa: PLC0415  check_plot has found it

    from ddpcore.display.picture import save  # noqa: PLC0415

    found = {title: _values(surface, metric) for title, surface in surfaces.items()}
    figure = Figure(figsize=(1 + 4.2 * len(surfaces), 4), layout="constrained")
    levels = levels_of(list(found.values()))
    drawn: Any = None
    panels = []
    for number, (title, values) in enumerate(found.items(), start=1):
        surface = surfaces[title]
        axes = figure.add_subplot(1, len(found), number, projection="3d" if kind == "3d" else None)
        drawn = _draw(axes, surface, values, kind, levels)
        axes.set_title(title, fontsize="small")
        axes.set(xlabel="x", ylabel="y")
        panels.append(axes)
        if kind != "3d":
            for name, (x, y) in surface.marks.items():
                axes.plot([x], [y], "o", color="black", markersize=4)
                axes.annotate(name, (x, y), textcoords="offset points", xytext=(4, 4), fontsize="x-small")
    if kind != "contour":
        figure.colorbar(drawn, ax=panels, label=metric, shrink=0.8)
    save(figure, path)


def _values(surface: Surface, metric: str) -> Array:
    if metric != "ratio":
        check_choice("metric", metric, [*surface.values, "ratio"])
    values = surface.ratio() if metric == "ratio" else surface.values[metric]
    if not np.isfinite(values).any():
        raise ValueError(f"no point of the landscape has a finite {metric}: there is nothing to draw")
    return np.ma.masked_invalid(values)


def levels_of(surfaces: Sequence[Array]) -> Array:
    """Contour levels for values with finite ones: in equal ratios if they are positive and differ much, else steps."""
    finite = np.concatenate([values[np.isfinite(values)] for values in surfaces])
    low, high = float(finite.min()), float(finite.max())
    if high <= low:
        return np.asarray([low, low + 1.0])
    if low > 0 and high / low > 20:
        return np.geomspace(low, high, 16)
    return np.linspace(low, high, 16)


def _draw(axes: Any, surface: Surface, values: Array, kind: str, levels: Array) -> Any:
    from matplotlib.colors import BoundaryNorm  # noqa: PLC0415

    norm = BoundaryNorm(levels, 256)
    if kind == "contour":
        lines = axes.contour(surface.x, surface.y, values, levels=levels, cmap="viridis", norm=norm)
        axes.clabel(lines, fontsize="xx-small")
        return lines
    if kind == "filled":
        return axes.contourf(surface.x, surface.y, values, levels=levels, cmap="viridis", norm=norm, extend="both")
    if kind == "heat":
        return axes.pcolormesh(surface.x, surface.y, values, cmap="viridis", norm=norm, shading="nearest")
    grid_x, grid_y = np.meshgrid(surface.x, surface.y)
    return axes.plot_surface(grid_x, grid_y, values, cmap="viridis", norm=norm)
