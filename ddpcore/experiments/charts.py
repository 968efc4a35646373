"""Charts of a study: lines over the variables of its question where it has some, and a list of the other rows."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpcore.display.chart import COLORS, Chart, Number, Series
from ddpcore.display.plot_option import check_plot

FEWEST = 3  # values of a variable in a line; two are enough if several lines have them
MOST_TICKS = 8  # of an axis
MOST_ROWS = 20  # of one list
MOST_BANDS = 6  # of one chart: more of them hide each other
ROWS_A_LINE = 6  # of the panels of curves
CURVES = {"effective_lr": "effective / learning rate", "loss": "training loss of the mean", "noise": "noise strength"}
_NUMBER = re.compile(r"^([A-Za-z]*?)(\d+(?:\.\d+)?)([A-Za-z]*)$")
_FIELDS = ("batch_size", "lr", "learners", "steps", "epochs", "period", "std", "trust_coefficient")
"""What a question may be about."""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Rows of a study as lines: the variable, and for each line its (value, row) in the order of the values."""

    variable: str
    lines: Mapping[str, Sequence[tuple[Any, str]]]

    @property
    def num_rows(self) -> int:
        """How many rows lie on the lines."""
        return sum(map(len, self.lines.values()))


def study_charts(comparison: Mapping[str, Any], run_labels: Sequence[str]) -> list[Chart]:
    """Charts of the study's first metric: published values, and the mean of each run with a bar from min to max."""
    metric = comparison["metrics"][0]
    cells = {line["row"]: line for line in comparison["lines"] if line["metric"] == metric}
    configs = comparison.get("configs", {})
    charts, rest = [], [row for row, cell in cells.items() if _has_value(cell)]
    for fewest in (FEWEST, 2):
        while (lines := lines_of([row for row in rest if _is_drawn(cells[row])], configs, fewest)) is not None:
            charts += _line_charts(lines, cells, metric, run_labels)
            on_lines = {row for line in lines.lines.values() for _, row in line}
            rest = [row for row in rest if row not in on_lines]
    parts = [rest[first : first + MOST_ROWS] for first in range(0, len(rest), MOST_ROWS)]
    return charts + [_list_chart(part, cells, metric, run_labels, others=bool(charts)) for part in parts]


def lines_of(rows: Sequence[str], configs: Mapping[str, Mapping[str, Any]], fewest: int = FEWEST) -> Lines | None:
    """The rows as lines over one variable: a part of their names with a number, or a field of their configs.

    The variable with the most rows on lines of at least ``fewest`` values is taken; None if they are less than half, or
    are two values on one line.
    """
    found = [*_by_names(rows, fewest), *_by_configs(rows, configs, fewest)]
    best = max((one for one in found if one.num_rows >= 3), key=lambda one: one.num_rows, default=None)
    return None if best is None or 2 * best.num_rows < len(rows) else best


def _by_names(rows: Sequence[str], fewest: int) -> list[Lines]:
    """Names that differ in one part, such as ``lars-256`` and ``lars-512``, are on one line."""
    schemes: dict[str, dict[str, list[tuple[Any, str]]]] = {}
    for row in rows:
        parts = row.split("-")
        for place, part in enumerate(parts):
            if any(c.isdigit() for c in part):
                number = _NUMBER.match(part)
                kind, value = (f"{number[1]}*{number[3]}", float(number[2])) if number else ("*", part)
                rest = "-".join([*parts[:place], kind, *parts[place + 1 :]])
                schemes.setdefault(f"{kind} {len(parts) - place if place else 'first'}", {}).setdefault(
                    rest, []).append((value, row))  # fmt: skip
    kinds = (_of_one_variable(_long(lines, fewest)) for lines in _merged(schemes))
    return [_scheme(_variable(lines), lines) for lines in kinds if lines]


def _merged(schemes: Mapping[str, dict[str, list[tuple[Any, str]]]]) -> list[dict[str, list[tuple[Any, str]]]]:
    """Schemes with one kind of part, such as ``*`` or ``J*``, belong together: a line's name has other parts too."""
    kinds: dict[str, dict[str, list[tuple[Any, str]]]] = {}
    for key, lines in schemes.items():
        together = kinds.setdefault(key.split(" ")[0], {})
        for name, points in lines.items():
            together.setdefault(name, []).extend(points)
    return list(kinds.values())


def _of_one_variable(lines: dict[str, list[tuple[Any, str]]]) -> dict[str, list[tuple[Any, str]]]:
    """Lines without common rows, each of which shares a value with another one: of such sets the one with most rows."""
    used: set[str] = set()
    groups: list[tuple[set[Any], list[str]]] = []  # values, and names of lines
    for name, points in sorted(lines.items(), key=lambda line: -len(line[1])):
        if used.isdisjoint(row for _, row in points):
            used.update(row for _, row in points)
            values, names = {value for value, _ in points}, [name]
            for other in [group for group in groups if not group[0].isdisjoint(values)]:
                groups.remove(other)
                values, names = values | other[0], names + other[1]
            groups.append((values, names))
    most = max((names for _, names in groups), key=lambda names: sum(len(lines[name]) for name in names), default=[])
    return {name: points for name, points in lines.items() if name in most}


def _by_configs(rows: Sequence[str], configs: Mapping[str, Mapping[str, Any]], fewest: int) -> list[Lines]:
    """Rows whose configs differ in one field alone are on one line."""
    found = []
    for name in _FIELDS:
        lines: dict[str, list[tuple[Any, str]]] = {}
        for row in rows:
            flat = _flat(configs.get(row, {}))
            if isinstance(flat.get(name), int | float):
                rest = repr(sorted((key, repr(value)) for key, value in flat.items() if key != name))
                lines.setdefault(rest, []).append((flat[name], row))
        named = {_common([row for _, row in points]): points for points in _long(lines, fewest).values()}
        if named:
            found.append(_scheme(name, named))
    return found


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    options = (config.get(f"{part}_options") for part in ("strategy", "optimizer"))
    return {**config, **{key: value for one in options if isinstance(one, Mapping) for key, value in one.items()}}


def _long(lines: Mapping[str, list[tuple[Any, str]]], fewest: int) -> dict[str, list[tuple[Any, str]]]:
    """The lines with at least ``fewest`` values, each value once."""
    return {
        name: points for name, points in lines.items() if len({value for value, _ in points}) == len(points) >= fewest
    }


def _scheme(variable: str, lines: Mapping[str, list[tuple[Any, str]]]) -> Lines:
    def ordered(points: list[tuple[Any, str]]) -> list[tuple[Any, str]]:
        numeric = all(isinstance(value, int | float) for value, _ in points)
        return sorted(points) if numeric else points

    return Lines(variable=variable, lines={_label(name): ordered(points) for name, points in lines.items()})


def _label(name: str) -> str:
    """A line's name without its variable: ``lars-*`` is ``lars``."""
    return "-".join(part for part in name.split("-") if "*" not in part) or "rows"


def _variable(lines: Mapping[str, Any]) -> str:
    parts = {part for name in lines for part in name.split("-") if "*" in part}
    kind = next(iter(parts), "*")
    return kind.replace("*", "").strip() or "value in the row's name"


def _common(rows: Sequence[str]) -> str:
    """The parts of the names that all rows share."""
    first, *others = (row.split("-") for row in rows)
    return "-".join(part for part in first if all(part in other for other in others)) or rows[0]


def _line_charts(lines: Lines, cells: Mapping[str, Any], metric: str, run_labels: Sequence[str]) -> list[Chart]:
    """One chart, where a dash stands for a run; or one for each run, if there are more lines than colours."""
    if len(run_labels) == 1 or len(lines.lines) <= len(COLORS):
        return [_line_chart(lines, cells, metric, run_labels)]
    charts = []
    for run, label in enumerate(run_labels):
        own = {row: {**cell, "measured": [cell["measured"][run]]} for row, cell in cells.items()}
        if any(_has_run(own[row], 0) for points in lines.lines.values() for _, row in points):
            chart = _line_chart(lines, own, metric, [label])
            charts.append(replace(chart, title=f"{chart.title}, {label}", note=f"{label}. {chart.note}"))
    return charts


def _line_chart(lines: Lines, cells: Mapping[str, Any], metric: str, run_labels: Sequence[str]) -> Chart:
    series = []
    runs_of = {
        name: [run for run in range(len(run_labels)) if any(_has_run(cells[row], run) for _, row in points)]
        for name, points in lines.lines.items()
    }
    bands = {
        (name, run)
        for name, points in lines.lines.items()
        for run in runs_of[name]
        if any(_num_seeds(cells[row], run) > 1 for _, row in points)
    }
    if len(bands) > MOST_BANDS:
        bands.clear()
    for number, (name, points) in enumerate(lines.lines.items()):
        x = [value for value, _ in points]
        printed = [cells[row]["published"] for _, row in points]
        ran = runs_of[name]
        if any(value is not None for value in printed):
            series.append(Series(
                name=f"{name}, published", x=x, y=printed, style="points", color=number, dash=0, marker="diamond",
                group=_series_name(name, run_labels, ran[0]) if ran else "",
            ))  # fmt: skip
        for run in ran:
            known = [(value, row) for value, row in points if _has_run(cells[row], run)]
            y, low, high = _measured([cells[row] for _, row in known], run)
            series.append(Series(
                name=_series_name(name, run_labels, run), x=[value for value, _ in known], y=y,
                low=low if (name, run) in bands else None, high=high if (name, run) in bands else None,
                style="line+points", color=number, dash=run if len(run_labels) > 1 else None,
            ))  # fmt: skip
    values = [value for points in lines.lines.values() for value, _ in points]
    is_wide = all(isinstance(value, int | float) and value > 0 for value in values) and max(values) >= 8 * min(values)
    variable = _named(lines, cells)
    ticks = sorted(set(values)) if all(isinstance(value, int | float) for value in values) else ()
    of_bands = ", with bands from the smallest to the largest seed" if bands else ""
    published = " Diamonds: published." if any(one.marker == "diamond" for one in series) else ""
    what = "Lines" if len(lines.lines) > 1 else next(iter(lines.lines))  # one line has no legend
    note = f"{what}: measured means{of_bands}.{published}"
    return Chart(
        title=f"{metric} over {variable}",
        x_label=variable,
        y_label=metric,
        series=series,
        log_x=is_wide,
        note=note,
        ticks=ticks if len(ticks) <= MOST_TICKS else (),
    )


def _has_value(cell: Mapping[str, Any]) -> bool:
    return cell["published"] is not None or any(cell["measured"])  # also if all runs diverged


def _is_drawn(cell: Mapping[str, Any]) -> bool:
    return cell["published"] is not None or any(_has_run(cell, run) for run in range(len(cell["measured"])))


def _has_run(cell: Mapping[str, Any], run: int) -> bool:
    return _num_seeds(cell, run) > 0


def _num_seeds(cell: Mapping[str, Any], run: int) -> int:
    return (cell["measured"][run] or {}).get("num_seeds", 0)


def _series_name(line: str, run_labels: Sequence[str], run: int) -> str:
    return f"{line}, {run_labels[run]}" if len(run_labels) > 1 else line


def _named(lines: Lines, cells: Mapping[str, Any]) -> str:
    """The variable's name: a field of the configs whose values are those of the rows, if there is one."""
    points = [point for line in lines.lines.values() for point in line]
    for name in _FIELDS:
        if all(_flat(cells[row].get("config") or {}).get(name) == value for value, row in points):
            return name
    return lines.variable


def _list_chart(
    rows: Sequence[str], cells: Mapping[str, Any], metric: str, run_labels: Sequence[str], *, others: bool
) -> Chart:
    printed = [cells[row]["published"] for row in rows]
    series = []
    if any(value is not None for value in printed):
        series.append(Series(name="published", x=rows, y=printed, style="points", marker="diamond", color=-1))
    for run, label in enumerate(run_labels):
        y, low, high = _measured([cells[row] for row in rows], run)
        series.append(Series(name=label, x=rows, y=y, low=low, high=high, style="points", color=run))
    title = f"{metric} of the other rows" if others else metric
    return Chart(title=title, kind="dots", x_label=metric, series=series)


def _measured(cells: Sequence[Mapping[str, Any]], run: int) -> tuple[list[Number], list[Number], list[Number]]:
    found = [cell["measured"][run] or {} for cell in cells]
    mean, low, high = ([one.get(key) for one in found] for key in ("mean", "min", "max"))
    return mean, low, high


def plot_comparison(comparison: dict[str, Any], path: Path, run_labels: list[str]) -> None:
    """Plot the study's first metric: lines over the variable of its question, and a list of the other rows.

    See :func:`study_charts`. The curves of runs, if there are any, follow below with
    ROWS_A_LINE rows in each line of panels: the median over seeds, shaded from the 20th to the 80th percentile.
    The same comparison gives the same file.

    Args:
        comparison: of one study, as ``ddpcore.experiments.compare.compare`` returns it.
        path: passes :func:`check_plot`.
        run_labels: for the legend.
    """
    check_plot(path)
    from matplotlib.figure import Figure  # noqa: PLC0415  check_plot has found it

    from ddpcore.display.picture import draw, height_of, save  # noqa: PLC0415

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
