"""Thinned curves, who waits for whom, what moved against a baseline, and lines of a study."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from ddpcore.report.baseline import Measure, baseline_section, verdict
from ddpcore.report.chart import MAX_COLUMNS, MAX_POINTS, Chart, Series, color_of, dash_of, thinned, thinned_chart
from ddpcore.report.plotly_chart import figure_of
from ddpcore.report.sources import Bench, Sources, read_sources
from ddpcore.report.static_chart import height_of, svg_of
from ddpcore.report.study_charts import lines_of, study_charts
from ddpcore.report.timeline import timeline_sections, what_if

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


def test_what_if() -> None:
    """Rank 1 is the slowest. At the second step rank 0 takes longer, so nothing is saved there."""
    compute = {0: [1.0, 5.0], 1: [4.0, 4.0], 2: [2.0, 1.0]}
    assert what_if(compute, {0: [4, 5], 1: [4, 5], 2: [4, 5.5]}) == (1, 2.0, 9.5)
    assert what_if({0: [1.0], 1: [1.0]}, {0: [1], 1: [1]})[1] == 0


def test_who_waits_for_whom(make_run: Make, recorded_steps: Any) -> None:
    recorded_steps[0].append({"step": 7, "compute": 1.0, "seconds": 1.0})  # rank 1 has not come so far
    (run,) = read_sources([make_run(steps=recorded_steps)]).runs
    (section,) = timeline_sections([run], ["a run"])
    means, waits = section.tables
    assert [row[:4] for row in means.rows] == [["0", "10", "5", "20"], ["1", "30", "5", "0"]]
    assert [list(row) for row in waits.rows] == [["rank 0", "0.0", "120.0"], ["rank 1", "0.0", "0.0"]]
    heat = next(chart for chart in section.charts if chart.title.startswith("Compute"))
    assert [list(series.y) for series in heat.series] == [[10] * 6, [30] * 6] and heat.series[0].x == [1, 2, 3, 4, 5, 6]
    assert "Slowest rank: 1" in section.lines[0] and "0.06 s" in section.lines[1]


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
        header["config"] |= fields
        (folder / "record.jsonl").write_text(json.dumps(header) + "\n" + "".join(others))
        return folder

    light = with_field(make_run("light", seed=1), accumulation=2, record_steps=True)
    heavy = with_field(make_run("heavy", seed=50), accumulation=4)
    before = read_sources([with_field(make_run("before", seed=2), accumulation=4)])
    for folders in ([light, heavy], [heavy, light]):
        section = baseline_section(read_sources(folders), before, [], [])
        found = {row[0]: row[2] for row in section.tables[0].rows}
        loss = "run dpsgd ring lenet5 synthetic 128 0.1 accumulation=4: train_loss"
        assert float(found[loss]) == pytest.approx(1 / 6 + 0.5, abs=1e-4)
        assert len(found) == 3 and "3 measures are only here" in section.lines[1]
    assert baseline_section(read_sources([light]), before, [], []).problems


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


def test_lines_by_names_and_by_configs() -> None:
    rows = [f"{rule}-{size}" for rule in ("sgd", "lamb") for size in (1024, 256, 512)]
    found = lines_of([*rows, "other"], {})
    assert found is not None
    assert found.lines == {
        rule: [(256.0, f"{rule}-256"), (512.0, f"{rule}-512"), (1024.0, f"{rule}-1024")] for rule in ("sgd", "lamb")
    }
    configs = {f"a-{word}": {"lr": lr, "model": "m"} for word, lr in (("full", 0.4), ("half", 0.2), ("low", 0.1))}
    found = lines_of(list(configs), configs)
    assert (
        found is not None
        and found.variable == "lr"
        and found.lines == {"a": [(0.1, "a-low"), (0.2, "a-half"), (0.4, "a-full")]}
    )
    assert lines_of(["a", "b", "c-1", "c-2"], {}, fewest=2) is None, "two values are no line"
    pairs = [f"{rule}-{size}" for rule in ("sgd", "lamb") for size in (256, 8192)]
    assert lines_of(pairs, {}) is None
    found = lines_of(pairs, {}, fewest=2)
    assert found is not None and list(found.lines) == ["sgd", "lamb"], "but several such lines are a chart"


def test_lines_are_of_one_variable_and_no_row_is_on_two() -> None:
    """Branches of k times the batch after S steps are lines over k, and not over S, which other rows have too."""
    branches = {step: [f"at-{step}-{k}" for k in (1, 2, 4, 8)] for step in (20, 40, 60)}
    found = lines_of([*(f"until-{step}" for step in branches), *chain(*branches.values())], {})
    assert found is not None
    assert found.lines == {
        f"at-{step}": [(float(row.split("-")[-1]), row) for row in rows] for step, rows in branches.items()
    }


def test_charts_of_a_study() -> None:
    """Rows on lines are in the first chart, each list has at most twenty rows, and no row with a number is lost."""
    rows = [*(f"sgd-{size}" for size in range(1, 41)), *(f"row {chr(97 + number)}" for number in range(25))]
    lines = [
        {"row": row, "metric": "m", "published": float(number), "config": {},
         "measured": [None if number % 2 else {"num_seeds": 1, "mean": 1.0 * number, "min": 0.0, "max": 9.0}]}
        for number, row in enumerate(rows)
    ]  # fmt: skip
    empty = {"row": "not run", "metric": "m", "published": None, "config": {}, "measured": [None]}
    lines.append(empty)
    first, *lists = study_charts({"metrics": ["m"], "lines": lines, "configs": {}}, ["measured"])
    published, measured = first.series
    assert published.marker == "diamond" and published.y == list(range(40)) and published.group == measured.name
    assert list(measured.y) == list(range(0, 40, 2)), "rows that were not run are left out"
    assert [len(chart.series[0].x) for chart in lists] == [20, 5]
    assert [row for chart in lists for row in chart.series[0].x] == rows[40:]


def of_study(rows: dict[str, dict[str, Any]], num_seeds: dict[str, int] | None = None) -> list[Chart]:
    """Charts of a study of these rows and configs. Each ran with one seed, or as often as ``num_seeds`` says."""
    ran = dict.fromkeys(rows, 1) | (num_seeds or {})
    lines = [
        {"row": row, "metric": "m", "published": None, "config": config,
         "measured": [{"num_seeds": ran[row], "mean": 1.0, "min": 1.0, "max": 1.0}]}
        for row, config in rows.items()
    ]  # fmt: skip
    return study_charts({"metrics": ["m"], "lines": lines, "configs": rows}, ["measured"])


def test_rows_of_a_second_variable_are_lines_too() -> None:
    """Of rates and of trust coefficients: each has its chart. One seed has no band."""
    rows: dict[str, dict[str, Any]] = {f"sgd-{lr}": {"lr": lr, "optimizer_options": {}} for lr in (0.1, 0.2, 0.4, 0.8)}
    rows |= {f"lars-0.1-{trust}": {"lr": 0.1, "optimizer_options": {"trust_coefficient": trust}} for trust in (1, 2, 3)}
    first, second, rest = of_study(rows | {"other": {}})
    assert (first.x_label, second.x_label) == ("lr", "trust_coefficient")
    assert [list(chart.series[0].x) for chart in (first, second, rest)] == [[0.1, 0.2, 0.4, 0.8], [1, 2, 3], ["other"]]
    assert rest.title == "m of the other rows"
    assert first.series[0].low is None and "bands" not in first.note
    assert first.note.startswith("sgd: ") and second.note.startswith("lars-0.1: "), "one line has no legend"


def test_lines_of_two_values() -> None:
    """Several of them are a chart, after those with more values."""
    rows: dict[str, dict[str, Any]] = {f"sgd-{size}": {"batch_size": size} for size in (1, 2, 4, 8)}
    pairs = {f"fair-{rule}-{size}": {"batch_size": size, "optimizer": rule} for rule in "ab" for size in (2, 8)}
    first, second = of_study(rows | pairs)
    assert [series.name for series in first.series] == ["sgd"]
    assert [(series.name, list(series.x)) for series in second.series] == [("fair-a", [2, 8]), ("fair-b", [2, 8])]


def test_rows_without_a_number_are_on_no_line() -> None:
    """Runs that all diverged are in the list."""
    rows: dict[str, dict[str, Any]] = {f"sgd-{lr}": {"lr": lr} for lr in (0.1, 0.2, 0.4)}
    diverged: dict[str, dict[str, Any]] = {f"lars-{size}": {"batch_size": size} for size in (1, 2, 3, 4)}
    first, rest = of_study(rows | diverged, dict.fromkeys(diverged, 0))
    assert (first.kind, first.x_label, rest.kind, list(rest.series[0].x)) == ("lines", "lr", "dots", list(diverged))


def test_a_picture_of_many_lines_names_them() -> None:
    """It is as high as its legend, up to thirty lines; with more it has none."""
    pytest.importorskip("matplotlib")

    def chart(count: int) -> Chart:
        series = [Series(name=f"line {number}", x=[1, 2], y=[1.0, 2.0]) for number in range(count)]
        return Chart(title="t", x_label="x", series=series)

    assert all(f"<!-- line {number} -->" in svg_of(chart(30)) for number in range(30))
    assert height_of(chart(30)) >= 30 * 0.18 > height_of(chart(31)) == height_of(chart(2))
    assert "<!-- line 1 -->" not in svg_of(chart(31)), "a legend that is higher than the picture"


def test_many_lines_of_a_study_are_told_apart() -> None:
    """No two have both the same colour and the same dash, and bands that would hide each other are left out."""
    lines = [
        {"row": f"{rule}-{size}", "metric": "m", "published": None, "config": {},
         "measured": [{"num_seeds": 2, "mean": 1.0 * size, "min": 0.0, "max": 9.0}]}
        for rule in "abcdefghij" for size in (1, 2, 4)
    ]  # fmt: skip
    (many,) = study_charts({"metrics": ["m"], "lines": lines, "configs": {}}, ["measured"])
    drawn = [(color_of(series, number), dash_of(series, number)) for number, series in enumerate(many.series)]
    assert len(set(drawn)) == len(drawn) == 10
    assert all(series.low is series.high is None for series in many.series) and "bands" not in many.note
    (few,) = study_charts({"metrics": ["m"], "lines": lines[:9], "configs": {}}, ["measured"])
    assert all(series.low == [0.0] * 3 for series in few.series) and "bands" in few.note
    for line in lines[18:]:
        line["measured"][0]["num_seeds"] = 1
    (some,) = study_charts({"metrics": ["m"], "lines": lines, "configs": {}}, ["measured"])
    assert [series.low is not None for series in some.series] == [True] * 6 + [False] * 4, "one seed has no band"
    two = [{**line, "measured": [line["measured"][0] | {"num_seeds": count} for count in (3, 1)]} for line in lines[:3]]
    (pair,) = study_charts({"metrics": ["m"], "lines": two, "configs": {}}, ["cpu", "full"])
    assert [series.low is not None for series in pair.series] == [True, False], "of one folder alone"


def test_more_lines_than_colours_of_two_runs() -> None:
    """Each run has its own chart, where lines are told apart as in one of this run alone."""

    def charts(count: int, means: Sequence[float | None]) -> list[Chart]:
        lines = [
            {"row": f"{rule}-{size}", "metric": "m", "published": 5.0, "config": {},
             "measured": [mean and {"num_seeds": 1, "mean": mean, "min": mean, "max": mean} for mean in means]}
            for rule in "abcdefghij"[:count] for size in (1, 2, 4)
        ]  # fmt: skip
        return study_charts({"metrics": ["m"], "lines": lines, "configs": {}}, ["cpu", "full"][: len(means)])

    assert len(charts(6, [1.0, 2.0])) == len(charts(7, [1.0])) == 1
    first, second = charts(7, [1.0, 2.0])
    assert (first.title, first.note) == (
        "m over value in the row's name, cpu",
        "cpu. Lines: measured means. Diamonds: published.",
    )
    assert second.title.endswith(", full")
    for chart, mean in ((first, 1.0), (second, 2.0)):
        measured = [series for series in chart.series if series.style == "line+points"]
        assert [series.name for series in measured] == list("abcdefg")
        assert all(list(series.y) == [mean] * 3 for series in measured)
        assert len({(color_of(series, 0), dash_of(series, 0)) for series in measured}) == 7
    (only,) = charts(7, [None, 2.0])
    assert only.title.endswith(", full"), "a run without a number has no chart"


@pytest.mark.parametrize("name", ["batch-size-cifar10", "saddle-escape"])
def test_committed_studies_have_lines(name: str) -> None:
    from ddpcore.report.compare import compare

    (comparison,) = compare([Path(__file__).parents[2] / "docs" / "results" / name])
    chart = study_charts(comparison, ["measured"])[0]
    assert chart.kind == "lines" and chart.log_x and " over " in chart.title
