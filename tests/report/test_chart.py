"""Who waits for whom, and pictures of charts."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from ddpcore.display.chart import Chart, Series
from ddpcore.display.picture import height_of, svg_of
from ddpcore.report.runs import MAX_COLUMNS, timeline_sections
from ddpcore.report.sources import read_sources

Make = Any  # of conftest.py


def test_a_picture_of_many_points_is_small_and_keeps_peaks() -> None:
    pytest.importorskip("matplotlib")

    def picture(values: list[float]) -> str:
        band = {"low": [-1.0] * len(values), "high": [6.0] * len(values)}
        return svg_of(Chart(title="t", series=[Series(name="a", x=range(len(values)), y=values, **band)]))

    flat = [0.0] * 100_000
    with_peak = picture([*flat[:55_555], 5.0, *flat[55_556:]])
    assert len(with_peak) < 200_000
    assert with_peak != picture(flat), "a peak of one step is drawn"


def test_a_heat_map_of_many_steps_keeps_the_largest_value(make_run: Make) -> None:
    lines = [{"step": step, "compute": 3.0 if step == 5005 else 0.0} for step in range(10_000)]
    (run,) = read_sources([make_run(steps={0: lines, 1: lines})]).runs
    (section,) = timeline_sections(run)
    row = section.charts[1].series[0]
    assert len(row.y) <= MAX_COLUMNS and max(value for value in row.y if value is not None) == 3000
    assert section.charts[1].note == "A column is the largest value of 25 steps."


def test_who_waits_for_whom(make_run: Make, recorded_steps: Any) -> None:
    recorded_steps[0].append({"step": 7, "compute": 1.0, "seconds": 1.0})  # rank 1 has not come so far
    (run,) = read_sources([make_run(steps=recorded_steps)]).runs
    (section,) = timeline_sections(run)
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
    assert timeline_sections(run)[0].lines == []


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
