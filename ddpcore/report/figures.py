"""The charts of a page as files for a paper: PDF and SVG pictures, and their numbers as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from ddpcore.display.chart import Chart
from ddpcore.display.picture import pdf_of, svg_of
from ddpcore.report.section import Section
from ddpcore.storage.files import replace_file

_COLUMNS = ("series", "x", "y", "low", "high")


def write_figures(sections: Sequence[Section], folder: Path) -> int:
    """Write ``TITLE.pdf``, ``.svg`` and ``.csv`` for each chart, and return how many charts there are.

    Charts with equal titles get a number. The CSV has all points, the pictures too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken: dict[str, int] = {}
    charts = [chart for section in sections for chart in section.charts]
    for chart in charts:
        name = re.sub(r"[^a-z0-9]+", "-", chart.title.lower()).strip("-")[:80] or "chart"
        taken[name] = taken.get(name, 0) + 1
        name += f"-{taken[name]}" if taken[name] > 1 else ""
        for suffix, content in (("pdf", pdf_of(chart)), ("svg", svg_of(chart).encode()), ("csv", _csv(chart))):
            replace_file(folder / f"{name}.{suffix}", content)
    return len(charts)


def _csv(chart: Chart) -> bytes:
    """A line for each point: its curve, x and y, and the ends of its band; what is not known is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for series in chart.series:
        gaps = [None] * len(series.y)
        for row in zip(series.x, series.y, series.low or gaps, series.high or gaps, strict=True):
            writer.writerow([series.name, *row])
    return out.getvalue().encode()
