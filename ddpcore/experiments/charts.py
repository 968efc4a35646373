"""Charts of a study: lines over the variables that the study names, a list of the other rows, and curves of runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain, product
from operator import itemgetter
from pathlib import Path
from typing import Any

from ddpcore.display.chart import COLORS, Chart, Number, Series, finite
from ddpcore.options.fields import get
from ddpcore.records.study import CURVES
from ddpcore.runtime.timing import quantiles

MOST_TICKS = 8  # of an axis
MOST_ROWS = 20  # of one list
MOST_BANDS = 6  # of one chart: more of them hide each other
ROWS_A_CHART = len(COLORS)  # of curves
TITLES = {
    "effective_lr": "Effective / set learning rate",
    "loss": "Training loss of the mean",
    "noise": "Noise strength",
    "train_loss": "Training loss of epochs",
    "accuracy_pct": "Test accuracy of epochs, %",
}

Lines = Mapping[str, Sequence[tuple[Any, str]]]
"""The (value, row) of each line by its name, in the order of the values."""
Columns = Mapping[str, Sequence[Sequence[tuple[Any, str]]]]
"""Of each line the published points, then those of each run."""
Cells = Mapping[str, Any]  # the cell of each row


def study_charts(comparison: Mapping[str, Any], labels: Sequence[str]) -> list[Chart]:
    """Charts of the study's first metric: published values, and the mean of each run with a bar from min to max."""
    metric = comparison["metrics"][0]
    cells = {line["row"]: line for line in comparison["lines"] if line["metric"] == metric}
    configs = [{row: cell["config"] for row, cell in cells.items() if cell["published"] is not None}]
    for run, found in enumerate(comparison["configs"]):
        configs.append({row: found[row] for row, cell in cells.items() if _num_seeds(cell, run)})
    charts, on_lines = [], set()
    for spec in comparison["charts"]:
        columns = [lines_of(spec, found) for found in configs]
        if known := dict.fromkeys(chain(*columns)):
            variable = spec["x"] if "values" in spec else spec["x"].rpartition(".")[2]
            names = [name for name in spec.get("lines", known) if name in known]
            lines = {name: [column.get(name, ()) for column in columns] for name in names}
            charts += _line_charts(variable, lines, cells, metric, labels)
        on_lines |= {(row, place) for place, column in enumerate(columns) for _, row in chain(*column.values())}
    rest = []  # also rows of which all runs diverged
    for row, cell in cells.items():
        numbers = {(row, place) for place, found in enumerate(configs) if row in found}
        if numbers - on_lines or (not numbers and any(cell["measured"])):
            rest.append(row)
    parts = [rest[first : first + MOST_ROWS] for first in range(0, len(rest), MOST_ROWS)]
    return charts + [_list_chart(part, cells, metric, labels, others=bool(charts)) for part in parts]


def lines_of(spec: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]]) -> Lines:
    """The lines of an entry ``[[charts]]``, which docs/experiments.md explains, with the rows that ``configs`` has."""
    by_name: dict[str, list[tuple[Any, str]]] = {}
    for value in spec.get("values", (None,)):
        for row in configs:
            x = get(configs[row], spec["x"]) if value is None else value
            for name in _lines_with(row, value, spec, configs[row]) if x is not None else ():
                by_name.setdefault(name, []).append((x, row))
    ordered = sorted(by_name, key=list(spec["lines"]).index) if "lines" in spec else list(by_name)
    return {name: by_name[name] if "values" in spec else sorted(by_name[name], key=itemgetter(0)) for name in ordered}


def _lines_with(row: str, value: Any, spec: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The names of the lines on which a row lies, at this value if there are ``values``."""
    if "by" in spec:
        return [str(get(config, spec["by"]))]
    filled = {name: [one.replace("{x}", str(value)) for one in rows] for name, rows in spec["lines"].items()}
    return [name for name, rows in filled.items() if any(fnmatchcase(row, one) for one in rows)]


def _line_charts(variable: str, lines: Columns, cells: Cells, metric: str, labels: Sequence[str]) -> list[Chart]:
    """One chart, where a dash stands for a run; or one for each run, if there are more lines than colours."""
    if len(labels) == 1 or len(lines) <= len(COLORS):
        return [_line_chart(variable, lines, cells, metric, labels)]
    charts = []
    for run, label in enumerate(labels):
        own = {row: {**cell, "measured": [cell["measured"][run]]} for row, cell in cells.items()}
        if any(measured[run] for _, *measured in lines.values()):
            alone = {name: [printed, measured[run]] for name, (printed, *measured) in lines.items()}
            chart = _line_chart(variable, alone, own, metric, [label])
            charts.append(replace(chart, title=f"{chart.title}, {label}", note=f"{label}. {chart.note}"))
    return charts


def _line_chart(variable: str, lines: Columns, cells: Cells, metric: str, labels: Sequence[str]) -> Chart:
    series = []
    bands = {
        (name, run)
        for name, (_, *measured) in lines.items()
        for run, points in enumerate(measured)
        if any(_num_seeds(cells[row], run) > 1 for _, row in points)
    }
    if len(bands) > MOST_BANDS:
        bands.clear()
    for number, (name, (published, *measured)) in enumerate(lines.items()):
        ran = [run for run, points in enumerate(measured) if points]
        if published:
            series.append(Series(
                name=f"{name}, published", x=[value for value, _ in published],
                y=[cells[row]["published"] for _, row in published],
                style="points", color=number, dash=0, marker="D",
                group=_series_name(name, labels, ran[0]) if ran else "",
            ))  # fmt: skip
        for run in ran:
            y, low, high = _measured([cells[row] for _, row in measured[run]], run)
            series.append(Series(
                name=_series_name(name, labels, run), x=[value for value, _ in measured[run]], y=y,
                low=low if (name, run) in bands else None, high=high if (name, run) in bands else None,
                style="line+points", color=number, dash=run if len(labels) > 1 else None,
            ))  # fmt: skip
    values = [value for one in series for value in one.x]
    is_wide = all(isinstance(value, int | float) and value > 0 for value in values) and max(values) >= 8 * min(values)
    ticks = sorted(set(values)) if all(isinstance(value, int | float) for value in values) else ()
    of_bands = ", with bands from the smallest to the largest seed" if bands else ""
    diamonds = " Diamonds: published." if any(one.marker == "D" for one in series) else ""
    what = "Lines" if len(lines) > 1 else next(iter(lines))  # one line has no legend
    return Chart(title=f"{metric} over {variable}", x_label=variable, y_label=metric, series=series, log_x=is_wide,
                 ticks=ticks if len(ticks) <= MOST_TICKS else (),
                 note=f"{what}: measured means{of_bands}.{diamonds}")  # fmt: skip


def _num_seeds(cell: Mapping[str, Any], run: int) -> int:
    return (cell["measured"][run] or {}).get("num_seeds", 0)


def _series_name(line: str, labels: Sequence[str], run: int) -> str:
    return f"{line}, {labels[run]}" if len(labels) > 1 else line


def _list_chart(rows: Sequence[str], cells: Cells, metric: str, labels: Sequence[str], *, others: bool) -> Chart:
    printed = [cells[row]["published"] for row in rows]
    series = []
    if any(value is not None for value in printed):
        series.append(Series(name="published", x=rows, y=printed, style="points", marker="D", color=-1))
    for run, label in enumerate(labels):
        y, low, high = _measured([cells[row] for row in rows], run)
        series.append(Series(name=label, x=rows, y=y, low=low, high=high, style="points", color=run))
    title = f"{metric} of the other rows" if others else metric
    return Chart(title=title, kind="dots", x_label=metric, series=series)


def _measured(cells: Sequence[Mapping[str, Any]], run: int) -> tuple[list[Number], list[Number], list[Number]]:
    found = [cell["measured"][run] or {} for cell in cells]
    mean, low, high = ([one.get(key) for one in found] for key in ("mean", "min", "max"))
    return mean, low, high


def curve_charts(comparison: Mapping[str, Any], labels: Sequence[str]) -> list[Chart]:
    """The curves of each row over steps and epochs: the median over seeds, from the 20th to the 80th percentile."""
    charts = []
    for label, curves in zip(labels, comparison["curves"], strict=True):
        about = f"{label}. " if len(labels) > 1 else ""
        note = f"{about}Median over seeds, with a band from the 20th to the 80th percentile."
        for x, names in CURVES.items():
            rows = [row for row, seeds in curves.items() if any(x in curve for curve in seeds)]
            for first, key in product(range(0, len(rows), ROWS_A_CHART), names):
                series = [_over_seeds(row, curves[row], x, key) for row in rows[first : first + ROWS_A_CHART]]
                lowest = min((y for one in series for y in (*one.y, *(one.low or ())) if y is not None), default=0.0)
                log_y = key not in ("effective_lr", "accuracy_pct") and lowest > 0
                charts.append(Chart(title=TITLES[key], x_label=x, y_label=key, series=series, note=note, log_y=log_y))
    return charts


def _over_seeds(row: str, seeds: Sequence[Mapping[str, Any]], x: str, key: str) -> Series:
    """A curve of the seeds that have a number at a step or an epoch. One seed has no band."""
    points: dict[float, list[float]] = {}
    for curve in seeds:
        for step, value in zip(curve.get(x, ()), curve.get(key, ()), strict=True):
            if finite(value) is not None:
                points.setdefault(step, []).append(value)
    steps = sorted(points)
    found = [quantiles(points[step]) for step in steps]
    low, y, high = ([one[key] for one in found] for key in ("p20", "p50", "p80"))
    return Series(name=row, x=steps, y=y, low=low if len(seeds) > 1 else None, high=high if len(seeds) > 1 else None)


def plot_comparison(comparison: Mapping[str, Any], path: Path, labels: Sequence[str]) -> None:
    """Draw :func:`study_charts` and :func:`curve_charts` into a file. The same comparison gives the same file."""
    from ddpcore.display.picture import plot_charts  # noqa: PLC0415  the options have found matplotlib

    plot_charts([*study_charts(comparison, labels), *curve_charts(comparison, labels)], path, comparison["title"])
