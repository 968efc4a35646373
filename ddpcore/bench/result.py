"""A kind of bench result: how a JSON file of it is known, and its tables and charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from ddpcore.display.chart import Chart, Series, with_values
from ddpcore.storage.limits import shown


class Kind(NamedTuple):
    """A kind of bench result.

    Attributes:
        knows: whether a JSON file with rows is such a result.
        title: of its section of the page.
        parts: its tables and sentences.
        charts: its charts.
    """

    knows: Callable[[dict[str, Any]], bool]
    title: str
    parts: Callable[[dict[str, Any]], Sequence[Table | str]]
    charts: Callable[[dict[str, Any]], Sequence[Chart]]

    def draw(self, result: dict[str, Any], path: Path) -> None:
        """Draw the charts of a result (as in the JSON file) into a PNG or SVG file.

        Raises:
            ValueError: see :func:`ddpcore.display.plot_option.check_plot`; or no row has a number to draw.
        """
        from ddpcore.display.picture import plot_charts  # noqa: PLC0415  matplotlib takes half a second to import

        drawn = with_values(self.charts(result))
        if not drawn:
            raise ValueError(f"--plot: no row has a number to draw, so {shown(path)} is not written")
        plot_charts(drawn, path, self.title if len(drawn) > 1 else "")


def has(key: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a row of a result has this key."""
    return lambda result: any(isinstance(row, dict) and key in row for row in result["rows"])


def bars(title: str, label: str, names: Sequence[str], quantiles: Sequence[Any]) -> Chart:
    """Bars of medians from p20 to p80; rows without numbers are left out."""
    found = [(name, values) for name, values in zip(names, quantiles, strict=True) if values is not None]
    series = spread_series(label, [name for name, _ in found], [values for _, values in found])
    return Chart(title=title, kind="bars", x_label=f"{label}, median, p20 to p80", series=[series])


def spread_series(name: str, x: Sequence[Any], quantiles: Sequence[Any], **style: Any) -> Series:
    """Medians from p20 to p80; None is a gap. ``style`` has further fields of the series."""
    low, middle, high = ([one and one[key] for one in quantiles] for key in ("p20", "p50", "p80"))
    return Series(name=name, x=x, y=middle, low=low, high=high, **style)


def environment_lines(environment: Mapping[str, Any]) -> list[str]:
    """The machine, the connection between the learners, and notes."""
    lines = [
        f"{environment['device']}, {environment['cores']} cores, {environment['threads_per_rank']} threads a rank; "
        f"torch {environment['torch']}, ddpcore {environment['ddpcore']} ({environment['commit'] or 'installed'})",
        f"backend {environment['backend']}: {environment['backend_reason']}",
    ]
    if environment["transport"] is not None:
        lines.append(f"transport {environment['transport']}: {environment['transport_reason']}")
    if environment["oversubscribed"]:
        lines.append("oversubscribed: more ranks than cores. Compare strategies in this table, not their scaling.")
    return [*lines, *environment["notes"]]


def size_name(mb: float | None) -> str:
    """A bucket size as text. Infinity, which is None in JSON, is one bucket."""
    return "one bucket" if mb in (None, float("inf")) else f"{mb:g} MiB"
