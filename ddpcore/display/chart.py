"""A chart as plain values. ``ddpcore.display.picture`` draws it; this file does not import matplotlib."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddpcore.options.fields import check, field
from ddpcore.options.typed import is_finite
from ddpcore.storage.files import shown

SUFFIXES = (".png", ".svg")
PLOT: Any = field(None, "also draw the result, .png or .svg (extra `report`)", is_file=True)


def check_plot(path: Path | None) -> None:
    """Raise ValueError if the file of ``--plot`` is neither PNG nor SVG, or matplotlib is missing. None is allowed."""
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot: {shown(path)} ends in neither {' nor '.join(SUFFIXES)}: name such a file")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'ddpcore[report]', or leave --plot out")


class Plotted:
    """Options of a command, made by :func:`~ddpcore.options.fields.field`, with a file for a picture of the result."""

    plot: Path | None

    def __post_init__(self) -> None:
        check(self)
        check_plot(self.plot)


# Okabe and Ito's colours, without those that vanish on a light or on a dark page.
COLORS = ("#2683c6", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREY = "#808080"
DASHES = ("-", "--", ":", "-.")  # as matplotlib names them

Number = float | None


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve, one group of bars, or the points of a drawing."""

    name: str  # in the legend
    x: Sequence[Any]
    y: Sequence[Number]  # None is a gap
    low: Sequence[Number] | None = None  # of a band around y, or of error bars; None: there is none
    high: Sequence[Number] | None = None
    style: str = "line"  # or "points", "line+points", "names": points with their text beside them; bars ignore it
    color: int | None = None  # index into COLORS, -1 for grey; None: the number of the series
    dash: int | None = None  # index into DASHES; None: follows from the number of the series
    marker: str = "o"  # or "D", a diamond
    text: Sequence[str] | None = None  # beside each point, of "names"
    group: str = ""  # the series that stands for this one in the legend; "": it stands for itself


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart.

    Its kind is "lines", "bars", "dots" (rows of points with bars), "heat", "contour" or "network" (lines without axes).
    """

    title: str  # one line
    kind: str = "lines"
    x_label: str = ""  # with units
    y_label: str = ""
    series: Sequence[Series] = ()  # of "heat" and "contour" also the rows of a map: x the columns, y the values
    log_x: bool = False
    log_y: bool = False
    note: str = ""  # a sentence below the chart
    ticks: Sequence[Any] = ()  # the values to mark on the x axis; (): chosen by the library
    rows: Sequence[float] = ()  # of "contour": the y coordinate of each row
    levels: Sequence[float] = ()  # of "contour": the values between two colours

    @property
    def curves(self) -> Sequence[Series]:
        """The series that are drawn as lines and points: all, but for bars and for the rows of a map."""
        return () if self.kind in ("bars", "dots", "heat") else self.series[len(self.rows) :]


def color_of(series: Series, number: int) -> str:
    """The colour of a series that is the ``number``-th of its chart."""
    if series.color == -1:
        return GREY
    return COLORS[(number if series.color is None else series.color) % len(COLORS)]


def dash_of(series: Series, number: int) -> str:
    """The dash of the ``number``-th series of a chart: it changes after each round of colours."""
    place = number if series.color is None else series.color
    return DASHES[(max(0, place) // len(COLORS) if series.dash is None else series.dash) % len(DASHES)]


def finite(value: Any) -> Number:
    """The value as a number. None: it is no number, it is not finite, or it is too large for a float."""
    return float(value) if is_finite(value) else None


def with_values(charts: Iterable[Chart]) -> list[Chart]:
    """The charts that have something to show."""
    return [chart for chart in charts if any(series.y for series in chart.series)]


def network(title: str, num_learners: int, edges: Iterable[Sequence[int]]) -> Chart:
    """A drawing of learners on a circle, with a line for each pair that exchanges weights."""
    angles = [2 * math.pi * number / max(1, num_learners) for number in range(num_learners)]
    x, y = [math.sin(angle) for angle in angles], [math.cos(angle) for angle in angles]
    known = (pair for pair in edges if isinstance(pair, list | tuple) and len(pair) == 2)  # a record may be damaged
    learners = range(num_learners)
    pairs = sorted({tuple(sorted(pair)) for pair in known if all(type(one) is int and one in learners for one in pair)})
    xs, ys = ([end for one, other in pairs for end in (at[one], at[other], None)] for at in (x, y))
    lines = Series(name="edges", x=xs, y=ys, color=0)
    nodes = Series(name="learners", x=x, y=y, text=[*map(str, learners)], style="names", color=0)
    return Chart(title=title, kind="network", series=[lines, nodes])
