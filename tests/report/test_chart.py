"""Thinned curves, who waits for whom, and pictures of charts."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from ddpcore.display.chart import MAX_COLUMNS, MAX_POINTS, Chart, Series, thinned, thinned_chart
from ddpcore.display.picture import height_of, svg_of
from ddpcore.report.sources import read_sources
from ddpcore.report.timeline import timeline_sections

Make = Any  # of conftest.py


def test_a_thinned_curve_keeps_peaks_and_ends() -> None:
    y: list[Any] = [0.0] * 10_000
    y[1234], y[7777] = 5.0, -5.0
    low, high = [value - 1 for value in y], [value + 1 for value in y]
    low[3333], high[4444] = -9.0, 9.0
    thin = thinned(Series(name="a", x=range(10_000), y=y, low=low, high=high))
    assert len(thin.y) <= 3 * MAX_POINTS and thin.low is not None and thin.high is not None
    points = dict(zip(thin.x, thin.y, strict=True))
    assert points[1234] == 5 and points[7777] == -5 and {0, 9999} <= set(points)
    assert min(thin.low) == -9 and max(thin.high) == 9, "the band keeps its widest points"
    assert list(thin.x) == sorted(thin.x)
    plain = thinned(Series(name="a", x=range(10_000), y=y))
    assert len(plain.y) <= MAX_POINTS + 2 and {1234, 7777} <= set(plain.x)


def test_a_thinned_curve_keeps_gaps() -> None:
    y: list[Any] = [1.0] * 10_000
    y[4000:6000] = [None] * 2000
    thin = thinned(Series(name="a", x=range(10_000), y=y))
    assert all((value is None) == (4000 <= x < 6000) for x, value in zip(thin.x, thin.y, strict=True))
    assert None in thin.y


def test_a_thinned_heat_map_keeps_the_largest_value() -> None:
    y = [0.0] * 10_000
    y[5005] = 3.0
    chart = thinned_chart(Chart(title="t", kind="heat", series=[Series(name="rank 0", x=range(10_000), y=y)]))
    (row,) = chart.series
    assert len(row.y) <= MAX_COLUMNS and max(value for value in row.y if value is not None) == 3
    assert "largest value of 25 steps" in chart.note
    short = Chart(title="t", series=[Series(name="a", x=[1], y=[2.0])])
    assert thinned_chart(short) is short


def test_who_waits_for_whom(make_run: Make, recorded_steps: Any) -> None:
    recorded_steps[0].append({"step": 7, "compute": 1.0, "seconds": 1.0})  # rank 1 has not come so far
    (run,) = read_sources([make_run(steps=recorded_steps)]).runs
    (section,) = timeline_sections(run, "a run")
    means, waits = section.tables
    assert [row[:4] for row in means.rows] == [["0", "10", "5", "20"], ["1", "30", "5", "0"]]
    assert [list(row) for row in waits.rows] == [["rank 0", "0.0", "120.0"], ["rank 1", "0.0", "0.0"]]
    heat = next(chart for chart in section.charts if chart.title.startswith("Compute"))
    assert [list(series.y) for series in heat.series] == [[10] * 6, [30] * 6] and heat.series[0].x == [1, 2, 3, 4, 5, 6]
    assert section.lines == [
        "Rank 1 is slow in the backward pass: 20 ms a step more than the median rank; the others wait 20 of 30 ms."
    ]
    old = {
        rank: [{k: v for k, v in line.items() if k != "forward"} for line in lines]
        for rank, lines in recorded_steps.items()
    }
    (run,) = read_sources([make_run("old", steps=old)]).runs  # recorded before passes were
    assert timeline_sections(run, "a run")[0].lines == []


def test_a_band_of_one_point_is_a_line() -> None:
    """An area of one point would not be seen."""
    pytest.importorskip("matplotlib")
    for low, high, is_line in (([1, None], [2, None], True), ([1, 1], [2, 2], False), ([1, None], [None, 2], False)):
        series = Series(name="a", x=[3, 4], y=[1.5, 1.5], low=low, high=high)
        assert ("LineCollection" in svg_of(Chart(title="t", series=[series]))) == is_line


def test_pictures_are_drawn_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    """Of letters that the font lacks."""
    pytest.importorskip("matplotlib")
    warnings.simplefilter("always")
    svg_of(Chart(title="t", x_label="日本", series=[Series(name="a", x=[1, 2], y=[1.0, 2.0])]))
    assert len(recwarn) == 0


def test_a_picture_of_many_lines_names_them() -> None:
    """It is as high as its legend, up to thirty lines; with more it has none."""
    pytest.importorskip("matplotlib")

    def chart(count: int) -> Chart:
        series = [Series(name=f"line {number}", x=[1, 2], y=[1.0, 2.0]) for number in range(count)]
        return Chart(title="t", x_label="x", series=series)

    picture = svg_of(chart(30))
    assert all(f"<!-- line {number} -->" in picture for number in range(30))
    assert height_of(chart(30)) >= 30 * 0.18 > height_of(chart(31)) == height_of(chart(2))
    assert "<!-- line 1 -->" not in svg_of(chart(31)), "a legend that is higher than the picture"
