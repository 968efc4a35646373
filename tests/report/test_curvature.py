"""The Hessian along a run and landscapes on the page: what is drawn, on which scale, and what is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpcore.display.chart import Chart
from ddpcore.display.picture import svg_of
from ddpcore.records.surface import Surface, write_surface
from ddpcore.report.page import page_of, sections_of
from ddpcore.report.sources import Section, read_sources

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

Make = Any  # of conftest.py


def surface(height: float, *, num: int = 5, ratio: bool = False) -> Surface:
    """``1 + height (x^2 + y^2)``."""
    axis = np.linspace(-1, 1, num)
    metrics = ("train_loss", "train_acc", *(("max_eig", "min_eig") if ratio else ()))
    found = Surface.empty(axis, axis, metrics, "two random directions", "")
    found.values["train_loss"][:] = 1 + height * (axis[None] ** 2 + axis[:, None] ** 2)
    if ratio:
        found.values["max_eig"][:], found.values["min_eig"][:] = 2.0, -0.5 + 0.1 * axis[None]
    found.done[:] = True
    found.marks["model"] = (0.0, 0.0)
    return found


def add(run: Path, name: str, one: Surface) -> Path:
    (run / "landscape").mkdir(exist_ok=True)
    write_surface(run / "landscape" / f"{name}.h5", one)
    return run / "landscape" / f"{name}.h5"


def section(title: str, *runs: Path) -> Section:
    return next(one for one in sections_of(read_sources(runs)) if one.title == title)


def test_landscapes_of_one_plane_have_one_scale(make_run: Make) -> None:
    one, other = make_run("a"), make_run("b")
    add(one, "random-0", surface(1.0))
    add(other, "random-0", surface(3.0, ratio=True))
    add(other, "eigenvectors", surface(1000.0))
    found = section("Landscapes", one, other)
    assert [chart.title for chart in found.charts] == [
        "Loss, b: eigenvectors",
        "Loss, a: random-0",
        "Loss, b: random-0",
        "|Smallest / largest eigenvalue|, b: random-0",
    ]
    steep, first, second, ratio = found.charts
    assert list(first.levels) == list(second.levels)
    assert (first.levels[0], first.levels[-1]) == pytest.approx((1.0, 7.0))
    assert np.allclose(np.diff(first.levels, 2), 0) and not np.allclose(np.diff(steep.levels, 2), 0)
    assert steep.levels[-1] == pytest.approx(2001)
    assert ratio.series[0].y == pytest.approx([0.3, 0.275, 0.25, 0.225, 0.2])
    assert first.series[-1].text == ["model"] and len(first.rows) == 5
    assert found.tables[0].rows[1][:2] == ["a: random-0", "25 of 25"]
    for chart in found.charts:
        assert "<svg" in svg_of(chart)


def test_the_page_has_a_static_picture_of_each(make_run: Make) -> None:
    run = make_run()
    add(run, "random-0", surface(1.0))
    page = page_of(sections_of(read_sources([run])))
    assert 'alt="Loss, run: random-0" src="data:image/svg+xml;base64,' in page


def test_partial_landscapes_and_values_that_are_not_finite(make_run: Make) -> None:
    run, partial, empty, large = make_run(), surface(100.0), surface(1.0), surface(1.0, num=200)
    partial.done[2:], partial.values["train_loss"][2:] = False, np.nan
    partial.values["train_loss"][0, 0] = np.inf
    empty.values["train_loss"][:] = np.nan
    for name, one in (("partial", partial), ("empty", empty), ("large", large)):
        add(run, name, one)
    found = section("Landscapes", run)
    by_title = {chart.title: chart for chart in found.charts}
    assert sorted(by_title) == ["Loss, run: large", "Loss, run: partial"]
    assert "10 of 25 points are computed" in by_title["Loss, run: partial"].note
    assert by_title["Loss, run: partial"].series[0].y[0] is None
    assert len(by_title["Loss, run: large"].rows) == 200
    assert found.tables[0].rows[0] == ["run: empty", "25 of 25", "-", "-", "-"]
    for chart in found.charts:
        assert "<svg" in svg_of(chart)


def test_a_damaged_landscape_costs_only_itself(make_run: Make) -> None:
    run = make_run()
    add(run, "good", surface(1.0))
    path = add(run, "bad", surface(1.0))
    path.write_bytes(path.read_bytes()[:1000])
    sections = sections_of(read_sources([run]))
    problems = [problem for one in sections for problem in one.problems]
    assert len(problems) == 1 and "bad.h5 is not a landscape, or it is damaged" in problems[0]
    assert [chart.title for chart in section("Landscapes", run).charts] == ["Loss, run: good"]


def test_the_hessian_along_a_run(make_run: Make) -> None:
    run = make_run()
    lines = [
        {"kind": "hessian", "step": 2, "largest": [4.0, 2.0], "smallest": -1.0, "disagreement": [0.25, 0.125],
         "noise_shares": None},
        {"kind": "hessian", "step": 4, "largest": [None, 2.0], "smallest": 10**400, "disagreement": None,
         "noise_shares": "damaged"},
    ]  # fmt: skip
    with (run / "record.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    charts: dict[str, Chart] = {chart.title: chart for chart in section("Hessian along the run", run).charts}
    assert sorted(charts) == [
        "Disagreement along the top eigenvectors",
        "Largest eigenvalue of the Hessian",
        "Smallest eigenvalue of the Hessian",
    ]
    assert [list(chart.series[0].y) for chart in charts.values()] == [[4.0, None], [-1.0, None], [0.375, None]]
    assert list(charts["Largest eigenvalue of the Hessian"].series[0].x) == [2, 4]
