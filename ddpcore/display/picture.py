"""Charts as PNG, SVG and PDF, drawn by matplotlib (extra ``report``), and landscapes as charts."""

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from ddpcore.display.chart import Chart, Series, check_plot, color_of, dash_of, finite
from ddpcore.options.typed import check_choice
from ddpcore.records.surface import Array, Surface
from ddpcore.storage.files import plain, replace_file

NETWORKS_A_LINE = 3
_LONG = 1000  # points of a band: with more it is an image, which stays small
_MOST_LABELS = 30  # of curves in a legend; with more there is none


def svg_of(chart: Chart) -> str:
    """The chart as the text of an SVG file. The same chart gives the same text."""
    return picture_of(chart, "svg", {"Date": None, "Creator": None}).decode()


def pdf_of(chart: Chart) -> bytes:
    """The chart as a PDF file. The same chart gives the same bytes."""
    return picture_of(chart, "pdf", {"CreationDate": None})


def picture_of(chart: Chart, kind: str, metadata: dict[str, Any]) -> bytes:
    """The chart as a file of this kind."""
    figure = Figure(figsize=(3.6 if chart.kind == "network" else 7.2, height_of(chart)), layout="constrained")
    draw(figure.subplots(), chart)
    out = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "ddpcore", "path.simplify_threshold": 0.5}):
        warnings.simplefilter("ignore")  # of letters that its font lacks, and of huge numbers
        figure.savefig(out, format=kind, metadata=metadata)
    return out.getvalue()


def height_of(chart: Chart) -> float:
    """The height of a picture of the chart, in inches."""
    if chart.kind == "lines":
        num_labels = sum(not series.group for series in chart.series)
        return max(3.2, 0.8 + 0.18 * num_labels) if num_labels <= _MOST_LABELS else 3.2
    if chart.kind not in ("bars", "dots"):
        return 3.2
    longest = max((len(series.x) for series in chart.series), default=0)
    return float(min(1.2 + 0.28 * longest * (len(chart.series) if chart.kind == "bars" else 1), 12))


def draw(axes: Any, chart: Chart) -> None:
    """Draw the chart into axes of matplotlib."""
    of_kind = {"bars": _bars, "dots": _bars, "heat": _heat, "contour": _contour}.get(chart.kind)
    if of_kind is not None:
        of_kind(axes, chart)
    for number, series in enumerate(chart.curves):
        _curve(axes, chart, series, number)
    if chart.kind == "network":
        axes.set_aspect("equal")
        axes.margins(0.15)
        axes.axis("off")
        return
    axes.set_xlabel(_text(chart.x_label))
    axes.spines[["top", "right"]].set_visible(False)
    if chart.log_x:
        axes.set_xscale("log")
    if chart.kind in ("lines", "contour"):
        axes.set_ylabel(_text(chart.y_label))
    if chart.kind == "lines":
        _finish_lines(axes, chart)
    if chart.kind in ("lines", "bars", "dots") and 1 < len(axes.get_legend_handles_labels()[1]) <= _MOST_LABELS:
        axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _curve(axes: Any, chart: Chart, series: Series, number: int) -> None:
    color, y = color_of(series, number), _numbers(series.y)
    if series.low is not None and series.high is not None:
        low, high = _numbers(series.low), _numbers(series.high)
        axes.fill_between(series.x, low, high, color=color, alpha=0.2, lw=0, rasterized=len(low) > _LONG)
        known = [False, *(not math.isnan(one + other) for one, other in zip(low, high, strict=True)), False]
        for index in range(len(low)):
            if known[index : index + 3] == [False, True, False]:  # an area of one point would not be seen
                axes.vlines(series.x[index], low[index], high[index], color=color, alpha=0.4, lw=1.6)
    if series.style == "names":
        is_node = chart.kind == "network"
        look = {"s": 220, "color": color} if is_node else {"s": 25, "color": "white", "edgecolors": "black"}
        axes.scatter(series.x, y, zorder=3, **look)
        place = {"ha": "center", "va": "center", "fontsize": 8} if is_node else {"fontsize": "x-small"}
        for at in zip(series.x, y, series.text or (), strict=False):
            offset = (0, 0) if is_node else (4, 4)
            axes.annotate(_text(at[2]), at[:2], offset, textcoords="offset points", color="white", zorder=4, **place)
        return
    axes.plot(
        series.x,
        y,
        color=color,
        linewidth=0.8 if chart.kind == "network" else 1.4,
        linestyle=dash_of(series, number) if "line" in series.style else "none",
        marker=series.marker if "points" in series.style else None,
        markersize=4,
        label="_" if series.group else _text(series.name),
    )


def _finish_lines(axes: Any, chart: Chart) -> None:
    if chart.log_y:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if high < 1e4 * low else (1.0,)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    if chart.ticks:
        texts = [f"{tick:g}" if isinstance(tick, int | float) else _text(str(tick)) for tick in chart.ticks]
        axes.set_xticks(list(chart.ticks), texts)
        axes.minorticks_off()
    axes.grid(alpha=0.25)


def _bars(axes: Any, chart: Chart) -> None:
    places = {name: place for place, name in enumerate(dict.fromkeys(x for s in chart.series for x in s.x))}
    height = (0.8 if chart.kind == "bars" else 0.4) / max(1, len(chart.series))
    for number, series in enumerate(chart.series):
        at = [places[x] + (number - (len(chart.series) - 1) / 2) * height for x in series.x]
        y = _numbers(series.y)
        ends = None
        if series.low is not None and series.high is not None:
            # How far the bar goes from each value to its ends; 0 without a value or an end.
            ends = [np.nan_to_num(abs(_numbers(end) - y)) for end in (series.low, series.high)]
        style: dict[str, Any] = {"color": color_of(series, number), "label": _text(series.name), "capsize": 2}
        if chart.kind == "dots":
            axes.errorbar(y, at, xerr=ends, fmt=series.marker, **style)
        else:
            axes.barh(at, y, height, xerr=ends, **style)
    axes.set_yticks(list(places.values()), [_text(str(name)) for name in places])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.25)


def _heat(axes: Any, chart: Chart) -> None:
    x = list(chart.series[0].x)
    values = [_numbers(series.y) for series in chart.series]
    extent = (x[0], x[-1], len(values) - 0.5, -0.5) if len(x) > 1 else None
    image = axes.imshow(values, aspect="auto", cmap="cividis", interpolation="nearest", extent=extent)
    axes.set_yticks(range(len(values)), [_text(series.name) for series in chart.series])
    axes.figure.colorbar(image, ax=axes, label=_text(chart.y_label))


def _contour(axes: Any, chart: Chart) -> None:
    levels, values = list(chart.levels), [_numbers(series.y) for series in chart.series[: len(chart.rows)]]
    colors = {"norm": BoundaryNorm(levels, 256, extend="both"), "cmap": "cividis", "extend": "both"}
    areas = axes.contourf(chart.series[0].x, chart.rows, values, levels=levels, **colors)
    axes.figure.colorbar(areas, ax=axes, format="%.3g")


def _numbers(values: Any) -> Array:
    return np.asarray(values, dtype=np.float64)  # None is NaN


def _text(text: str) -> str:
    """Text for matplotlib, which reads dollar signs as formulas."""
    return plain(text).replace("$", r"\$")


def plot_charts(charts: Sequence[Chart], path: Path, title: str) -> None:
    """Draw at least one chart into a file that passes :func:`check_plot`, below each other, and networks side by side.

    A title, if there is one, stands above them. The same charts give the same file.
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
    if title:
        figure.suptitle(title, fontsize="medium")
    grid = figure.add_gridspec(len(lines), NETWORKS_A_LINE, height_ratios=heights)
    for number, line in enumerate(lines):
        for column, chart in enumerate(line):
            axes = figure.add_subplot(grid[number, column if chart.kind == "network" else slice(None)])
            draw(axes, chart)
            title = "\n".join(_text(text) for text in (chart.title, chart.note) if text)
            axes.set_title(title, fontsize="small", loc="left")
    out, metadata = io.BytesIO(), {"Date": None} if path.suffix == ".svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "ddpcore"}):
        figure.savefig(out, format=path.suffix[1:], metadata=metadata)
    replace_file(path, out.getvalue())


def plot_surfaces(surfaces: Mapping[str, Surface], path: Path, *, metric: str = "train_loss") -> None:
    """Draw contours of surfaces with the same scale of colours. The same surfaces give the same file.

    Args:
        surfaces: by title.
        path: passes :func:`check_plot`.
        metric: a metric of the surfaces, or ``ratio`` for ``|min_eig / max_eig|``.

    ValueError: an unknown metric, or a surface without finite values.
    """
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
    return [_contour_chart(title, surfaces[title], values, levels) for title, values in found.items()]


def levels_of(surfaces: Sequence[Array]) -> Array:
    """Contour levels for values with finite ones: in equal ratios if they are positive and differ much, else steps."""
    known = np.concatenate([values[np.isfinite(values)] for values in surfaces])
    low, high = float(known.min()), float(known.max())
    if high <= low:
        return np.asarray([low, low + 1.0])
    return np.geomspace(low, high, 16) if low > 0 and high / low > 20 else np.linspace(low, high, 16)


def _contour_chart(title: str, surface: Surface, values: Array, levels: Sequence[float]) -> Chart:
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
