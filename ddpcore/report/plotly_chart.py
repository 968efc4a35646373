"""A chart as the JSON of plotly.js. Colours of text and grid come from the page, in JavaScript."""

from __future__ import annotations

import math
from typing import Any

from ddpcore.display.chart import GREY, Chart, Series, band_parts, color_of, dash_of, distances, finite
from ddpcore.storage.limits import plain

_ON_MAP = {
    "textposition": "top right",
    "marker": {"color": "#ffffff", "size": 8, "line": {"color": "#000000", "width": 1}},
}
HEAT = "Cividis"  # readable with every colour blindness, and in grey


def figure_of(chart: Chart) -> dict[str, Any]:
    """Data and layout of a chart, with short numbers."""
    of_kind = {"bars": _bars, "dots": _bars, "heat": _heat, "contour": _contour}.get(chart.kind)
    return {"data": [*(of_kind(chart) if of_kind else ()), *_curves(chart)], "layout": _layout(chart)}


def _layout(chart: Chart) -> dict[str, Any]:
    layout: dict[str, Any] = {"showlegend": chart.has_legend}
    if chart.kind == "network":
        hidden = {"visible": False, "fixedrange": True}
        return {"xaxis": hidden, "yaxis": {**hidden, "scaleanchor": "x"}, **layout}
    # powers of ten, not SI prefixes, which would be 1k for 1000 and 1µ for 1e-6
    x_axis, y_axis = (  # type: dict[str, Any], dict[str, Any]
        {"exponentformat": "power", "minexponent": 6, "title": {"text": _text(label)}, "type": "log" if is_log else "-"}
        for label, is_log in ((chart.x_label, chart.log_x), (chart.y_label, chart.log_y))
    )
    if chart.ticks:
        x_axis |= {"tickmode": "array", "tickvals": list(chart.ticks), "ticktext": [*map(_text, chart.tick_texts)]}
    if chart.kind == "heat":
        y_axis = {"type": "category", "autorange": "reversed"}
    if chart.kind in ("bars", "dots"):
        y_axis |= {"type": "category", "autorange": "reversed", "automargin": True}
        layout |= {"barmode": "group"}
    if chart.kind == "contour":
        y_axis |= {"type": "-"}
        layout |= {"hovermode": "closest"}
    return {"xaxis": x_axis, "yaxis": y_axis, **layout}


def _curves(chart: Chart) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    for number, series in enumerate(chart.curves):
        color, name = color_of(series, number), _text(series.name)
        traces += _band(series, color)
        trace: dict[str, Any] = {
            "x": _short(series.x), "y": _short(series.y), "name": name, "legendgroup": _text(series.group) or name,
            "showlegend": not series.group, "mode": series.style.replace(
                "points", "markers").replace("line", "lines").replace("names", "markers+text"),
            "line": {"color": color, "width": 1.8, "dash": dash_of(series, number)},
            "marker": {"color": color, "size": 7, "symbol": series.marker},
        }  # fmt: skip
        if series.hidden:
            trace["visible"] = "legendonly"
        if series.text is not None:
            trace["text"] = [_text(text) for text in series.text]
        if series.style == "names":
            trace |= {"hoverinfo": "text", "textfont": {"color": "#ffffff", "size": 10}}
            trace |= {"marker": {"color": color, "size": 20}} if chart.kind == "network" else _ON_MAP
        elif chart.kind == "network":
            trace |= {"hoverinfo": "skip", "line": {"color": color, "width": 1}}
        traces.append(trace)
    return traces


def _band(series: Series, color: str) -> list[dict[str, Any]]:
    """Its lower and upper edge; a line where only one point has a band. Plotly would fill the gaps between parts."""
    traces: list[dict[str, Any]] = []
    for part in band_parts(series):
        assert series.low is not None and series.high is not None
        x, low, high = (_short(values[part]) for values in (series.x, series.low, series.high))
        edge: dict[str, Any] = {"mode": "lines", "hoverinfo": "skip", "showlegend": False,
                                "legendgroup": _text(series.group or series.name)}  # fmt: skip
        if len(x) == 1:
            traces.append({**edge, "x": [*x, *x], "y": [*low, *high], "line": {"width": 2, "color": color + "55"}})
            continue
        edge |= {"x": x, "line": {"width": 0}}
        traces += [{**edge, "y": low}, {**edge, "y": high, "fill": "tonexty", "fillcolor": color + "33"}]
    return traces


def _bars(chart: Chart) -> list[dict[str, Any]]:
    traces = []
    for number, series in enumerate(chart.series):
        points = {"mode": "markers", "marker": {"color": color_of(series, number), "size": 9, "symbol": series.marker}}
        bars = {"type": "bar", "orientation": "h", "marker": {"color": color_of(series, number)}}
        trace: dict[str, Any] = {
            **(points if chart.kind == "dots" else bars), "x": _short(series.y), "y": [_text(str(x)) for x in series.x],
            "name": _text(series.name),
        }  # fmt: skip
        if series.low is not None and series.high is not None:
            trace["error_x"] = {
                "type": "data", "symmetric": False, "thickness": 1.5, "width": 4,
                "color": GREY if chart.kind == "bars" else color_of(series, number),
                "array": _short(distances(series.y, series.high)),
                "arrayminus": _short(distances(series.y, series.low)),
            }  # fmt: skip
        traces.append(trace)
    return traces


def _heat(chart: Chart) -> list[dict[str, Any]]:
    x = next((series.x for series in chart.series), ())
    return [{
        "type": "heatmap", "x": list(x), "y": [_text(series.name) for series in chart.series],
        "z": [_short(series.y) for series in chart.series], "colorscale": HEAT, "hoverongaps": False,
        "colorbar": {"title": {"text": _text(chart.y_label), "side": "right"}, "thickness": 12},
    }]  # fmt: skip


def _contour(chart: Chart) -> list[dict[str, Any]]:
    """Plotly has equal steps between levels: on a logarithmic scale it gets logarithms, and the values as text."""
    num = len(chart.rows)
    values = [_short(series.y) for series in chart.series[:num]]
    scale = math.log10 if chart.log_y else float
    ends = [scale(end) for end in (chart.levels[0], chart.levels[-1])]
    marked = chart.levels[:: max(1, len(chart.levels) // 5)]
    trace: dict[str, Any] = {
        "type": "contour", "x": _short(chart.series[0].x), "y": _short(chart.rows), "colorscale": HEAT,
        "z": [[None if value is None or (chart.log_y and value <= 0) else scale(value) for value in row]
              for row in values],
        "text": [["-" if value is None else f"{value:.4g}" for value in row] for row in values],
        "hovertemplate": "x %{x}, y %{y}: %{text}<extra></extra>", "autocontour": False,
        "contours": {"start": ends[0], "end": ends[1], "size": (ends[1] - ends[0]) / max(1, len(chart.levels) - 1)},
        "zmin": ends[0], "zmax": ends[1], "line": {"width": 0.5},
        "colorbar": {"thickness": 12, "tickmode": "array", "tickvals": [scale(level) for level in marked],
                     "ticktext": [f"{level:.3g}" for level in marked]},
    }  # fmt: skip
    return [trace]


def _text(text: str) -> str:
    """Text for plotly, which interprets some tags of HTML: a chart must show them as text."""
    return plain(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _short(values: Any) -> list[Any]:
    """Numbers with six digits, which is more than a screen shows; None for those that JSON does not have."""
    return [_shortened(value) if isinstance(value, float) else value for value in values]


def _shortened(value: float) -> float | None:
    return None if finite(value) is None else float(f"{value:.6g}")
