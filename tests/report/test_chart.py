"""Thinned curves, who waits for whom, what moved against a baseline, and lines of a study."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from ddpcore.display.chart import MAX_COLUMNS, MAX_POINTS, Chart, Series, thinned, thinned_chart
from ddpcore.display.picture import height_of, svg_of
from ddpcore.options.keys import put
from ddpcore.records.config import BOOKKEEPING
from ddpcore.report.baseline import Measure, baseline_section, verdict
from ddpcore.report.plotly_chart import figure_of
from ddpcore.report.sources import Bench, Sources, read_sources
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


def test_verdicts_against_a_baseline() -> None:
    before = Measure(2.0, 1.0, 3.0)
    assert verdict(before, Measure(3.5, 3.1, 4.0)) == "moved up"
    assert verdict(before, Measure(0.5, 0.1, 0.9)) == "moved down"
    assert verdict(before, Measure(3.5, 2.9, 4.0)) == "within the spread"
    assert verdict(before, Measure(9.0, None, None)).startswith("no spread")


def bench(*milliseconds: float) -> Sources:
    rows = [
        {"strategy": f"s{number}", "step_ms": {"p20": 0.9 * ms, "p50": ms, "p80": 1.1 * ms}}
        for number, ms in enumerate(milliseconds)
    ]
    return Sources(benches=[Bench(name="b", result={"rows": rows})])


def test_what_moved_is_marked() -> None:
    section = baseline_section(bench(10, 20, 30), bench(10, 10), [], [])
    (table,) = section.tables
    assert [row[-1] for row in table.rows] == ["within the spread", "moved up"] and table.marks == {1: "moved"}
    assert table.rows[1][3] == "2" and "1 measures are only here" in section.lines[1]
    nothing = baseline_section(bench(10), Sources(), [], [])
    assert "no measure in common, so nothing is compared" in nothing.problems[0]


def test_runs_of_several_seeds_have_a_spread(make_run: Make) -> None:
    runs = read_sources([make_run(f"s{seed}", seed=seed) for seed in (0, 1, 2)])
    high = read_sources([make_run(f"t{seed}", seed=seed) for seed in (50, 60)])
    rows = baseline_section(high, runs, [], []).tables[0].rows
    assert {row[0].split(": ")[1]: row[-1] for row in rows} == {
        "train_loss": "moved up", "accuracy": "within the spread", "total_seconds": "within the spread"
    }  # fmt: skip


def test_benches_of_other_models_are_not_compared() -> None:
    def of(model: str, ms: float) -> Sources:
        rows = [{"strategy": "ssgd", "step_ms": dict.fromkeys(("p20", "p50", "p80"), ms)}]
        config = {"model": model, "batch_size": 8}
        return Sources(benches=[Bench(name="b", result={"rows": rows, **more(config)}) for more in (dict, wrapped)])

    def wrapped(config: dict[str, Any]) -> dict[str, Any]:
        return {"config": {**config, "every": 5}}

    assert "nothing is compared" in baseline_section(of("resnet18", 100), of("mlp", 1), [], []).problems[0]
    (table,) = baseline_section(of("mlp", 100), of("mlp", 1), [], []).tables
    assert [row[0] for row in table.rows] == ["mlp 8 ssgd: step_ms", "mlp 8 5 ssgd: step_ms"]


def test_runs_that_differ_in_more_than_their_seed_are_not_compared(make_run: Make) -> None:
    """In whatever order they are named. How often a run saves or records changes no result."""

    def with_field(folder: Path, **fields: Any) -> Path:
        first, *others = (folder / "record.jsonl").read_text().splitlines(keepends=True)
        header = json.loads(first)
        for name, value in fields.items():
            put(header["config"], name, value)
        (folder / "record.jsonl").write_text(json.dumps(header) + "\n" + "".join(others))
        return folder

    light = with_field(make_run("light", seed=1), **{"data.accumulation": 2, "run.record_steps": True})
    heavy = with_field(make_run("heavy", seed=50), **{"data.accumulation": 4})
    before = read_sources([with_field(make_run("before", seed=2), **{"data.accumulation": 4})])
    for folders in ([light, heavy], [heavy, light]):
        section = baseline_section(read_sources(folders), before, [], [])
        found = {row[0]: row[2] for row in section.tables[0].rows}
        loss = "run accumulation=4: train_loss"
        assert float(found[loss]) == pytest.approx(1 / 6 + 0.5, abs=1e-4)
        assert len(found) == 3 and "3 measures are only here" in section.lines[1]
    assert baseline_section(read_sources([light]), before, [], []).problems


def test_fields_that_change_no_result_do_not_tell_runs_apart(make_run: Make) -> None:
    """All of them, such as the timeout, and what a run saves."""
    others = {
        "strategy.timeout": 9.0, "run.save_nonfinite": True, "run.keep_last": 7, "run.keep_best": True,
        "data.data_dir": "elsewhere", "run.checkpoint_every": 3, "run.record_steps": True, "data.download": True,
        "strategy.learners_at_once": 1,
    }  # fmt: skip
    assert set(others) == set(BOOKKEEPING)
    for field, value in others.items():
        runs, before = (read_sources([make_run(f"{name}-{field}")]) for name in ("now", "before"))
        put(before.runs[0].header["config"], field, value)
        assert len(baseline_section(runs, before, [], []).tables[0].rows) == 3, field


def test_a_band_has_no_values_between_its_parts() -> None:
    """Plotly joins a band over the points that have none."""
    for library in ("plotly", "matplotlib"):
        pytest.importorskip(library)
    low, high = [1, 1, None, 2, None, 3, 3], [2, 2, None, None, None, 4, 4]
    series = Series(name="a", x=range(7), y=[1.5] * 7, low=low, high=high)
    traces = figure_of(Chart(title="t", series=[series]))["data"]
    assert [trace["x"] for trace in traces] == [[0, 1], [0, 1], [5, 6], [5, 6], list(range(7))]
    assert [trace.get("fill") for trace in traces] == [None, "tonexty", None, "tonexty", None]
    one = Series(name="a", x=[3, 4], y=[1.5, 1.5], low=[1, None], high=[2, None])
    (line, _) = figure_of(Chart(title="t", series=[one]))["data"]
    assert (line["x"], line["y"]) == ([3, 3], [1, 2]), "a band of one point is a line"
    assert "LineCollection" in svg_of(Chart(title="t", series=[one]))


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
