"""Charts of a study: lines over the variable of its question, lists of other rows, and curves of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpcore.display.chart import Chart, color_of, dash_of
from ddpcore.experiments import charts as drawing
from ddpcore.experiments import study
from ddpcore.experiments.charts import lines_of, study_charts
from ddpcore.experiments.compare import compare

SEEDS = [{"step": [0, 10], "effective_lr": [1.0, seed], "loss": [2.0, 1.0], "noise": [0.1, 0.2]} for seed in range(6)]
COMPARISON: dict[str, Any] = {
    "title": "A study", "metrics": ["error_pct"], "charts": [], "configs": [{"a": {}}],
    "lines": [{"row": "a", "metric": "error_pct", "published": 3.0, "config": {}, "measured": [
        {"num_seeds": 6, "mean": 2.0, "min": 1.0, "max": 4.0}]}],
    "curves": [{"a": SEEDS}],
}  # fmt: skip


def test_curves_are_medians_between_percentiles() -> None:
    comparison = {"curves": [{"a": [*SEEDS, {**SEEDS[0], "step": [0, 20]}], "one": SEEDS[:1]}]}
    chart, loss, _ = drawing.curve_charts(comparison, ["measured"])
    seeds, one = chart.series
    assert (list(seeds.x), list(seeds.y)) == ([0, 10, 20], [1, 2.5, 0]), "step 20 is of one seed alone"
    assert (seeds.low, seeds.high) == ([1, 1, 0], [1, 4, 0])
    assert (one.low, one.high) == (None, None)
    assert not chart.log_y and loss.log_y
    many = {"curves": [{f"row {number}": SEEDS for number in range(8)}, {}]}
    charts = drawing.curve_charts(many, ["cpu", "full"])
    assert [len(chart.series) for chart in charts] == [6, 6, 6, 2, 2, 2], "no more rows than colours"


def test_curves_over_epochs_and_steps() -> None:
    """Each row is in the charts of its own curves."""
    losses = [{"epoch": [1, 2], "train_loss": [3.0 + seed, 1.0]} for seed in range(3)]
    charts = drawing.curve_charts({"curves": [{"both": [SEEDS[0] | losses[0]], "losses": losses}]}, ["measured"])
    assert [(chart.x_label, chart.y_label) for chart in charts] == [
        ("step", "effective_lr"), ("step", "loss"), ("step", "noise"), ("epoch", "train_loss"),
    ]  # fmt: skip
    assert [[series.name for series in chart.series] for chart in charts] == [["both"]] * 3 + [["both", "losses"]]
    assert (list(charts[-1].series[1].x), list(charts[-1].series[1].y)) == ([1, 2], [4.0, 1.0])
    tested = {"evaluated epoch": [5, 10], "accuracy_pct": [20.0, 30.0]}
    (chart,) = drawing.curve_charts({"curves": [{"tested": [tested]}]}, ["measured"])
    assert (chart.title, list(chart.series[0].y), chart.log_y) == ("Test accuracy of epochs, %", [20.0, 30.0], False)


def test_a_comparison_gives_the_same_file_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("first.svg", "second.svg"):
        drawing.plot_comparison(COMPARISON, tmp_path / name, ["measured"])
    text = (tmp_path / "first.svg").read_text()
    assert text == (tmp_path / "second.svg").read_text()
    assert all(words in text for words in ("error_pct", "Training loss of the mean", "Noise strength"))


RULES = {"x": "size", "lines": {rule: [f"{rule}-*"] for rule in "abcdefghij"}}


def test_lines_of_rows_and_by_a_field() -> None:
    """The variable is a field, with dots for options. Rows without it are on no line, and the values are in order."""
    configs: dict[str, dict[str, Any]] = {
        "a-full": {"lr": 0.4, "rule": "sgd", "options": {"momentum": 0.9}},
        "a-half": {"lr": 0.2, "rule": "sgd", "options": {"momentum": 0.5}},
        "b-full": {"lr": 0.1, "rule": "lamb", "options": {}},
    }
    named = lines_of({"x": "lr", "lines": {"second": ["b-*"], "first": ["a-half", "a-full"]}}, configs)
    assert named == {"second": [(0.1, "b-full")], "first": [(0.2, "a-half"), (0.4, "a-full")]}
    assert list(named) == ["second", "first"]
    assert lines_of({"x": "lr", "by": "rule"}, configs) == {"sgd": named["first"], "lamb": named["second"]}
    of_options = lines_of({"x": "options.momentum", "lines": {"all": ["*"]}}, configs)
    assert of_options == {"all": [(0.5, "a-half"), (0.9, "a-full")]}
    assert lines_of({"x": "lr.more", "by": "rule"}, configs) == {}


def test_lines_over_values_of_names() -> None:
    """In the order of the study, also of words. A row that is not there leaves its value out."""
    spec = {"x": "hosts", "values": ["2x2", "1x1", 3], "lines": {"mlp": ["mlp-{x}"], "none": ["none-{x}"]}}
    assert lines_of(spec, {"mlp-1x1": {}, "mlp-3": {}, "mlp-2x2": {}, "mlp-4": {}}) == {
        "mlp": [("2x2", "mlp-2x2"), ("1x1", "mlp-1x1"), (3, "mlp-3")]
    }


def test_charts_of_a_study() -> None:
    """Rows on lines are in the first chart, each list has at most twenty rows, and no row with a number is lost."""
    rows = [*(f"sgd-{size}" for size in range(1, 41)), *(f"row {chr(97 + number)}" for number in range(25))]
    lines: list[dict[str, Any]] = [
        {"row": row, "metric": "m", "published": float(number), "config": {"size": number} if number < 40 else {},
         "measured": [None if number % 2 else {"num_seeds": 1, "mean": 1.0 * number, "min": 0.0, "max": 9.0}]}
        for number, row in enumerate(rows)
    ]  # fmt: skip
    empty = {"row": "not run", "metric": "m", "published": None, "config": {}, "measured": [None]}
    lines.append(empty)
    first, *lists = study_charts(comparison_of(lines, {"x": "size", "lines": {"sgd": ["sgd-*"]}}), ["measured"])
    published, measured = first.series
    assert published.marker == "D" and published.y == list(range(40)) and published.group == measured.name
    assert list(measured.y) == list(range(0, 40, 2)), "rows that were not run are left out"
    assert [len(chart.series[0].x) for chart in lists] == [20, 5]
    assert [row for chart in lists for row in chart.series[0].x] == rows[40:]


def comparison_of(lines: Sequence[dict[str, Any]], *specs: dict[str, Any]) -> dict[str, Any]:
    """Of lines with their configs, for charts of these specs."""
    configs = [{line["row"]: line["config"] for line in lines}] * len(lines[0]["measured"])
    return {"metrics": ["m"], "lines": lines, "configs": configs, "charts": specs}


def of_study(
    rows: dict[str, dict[str, Any]], *specs: dict[str, Any], num_seeds: dict[str, int] | None = None
) -> list[Chart]:
    """Charts of a study of these rows and configs. Each ran with one seed, or as often as ``num_seeds`` says."""
    ran = dict.fromkeys(rows, 1) | (num_seeds or {})
    lines = [
        {"row": row, "metric": "m", "published": None, "config": config,
         "measured": [{"num_seeds": ran[row], "mean": 1.0, "min": 1.0, "max": 1.0}]}
        for row, config in rows.items()
    ]  # fmt: skip
    return study_charts(comparison_of(lines, *specs), ["measured"])


def test_a_chart_for_each_variable() -> None:
    """Of rates and of trust coefficients. One seed has no band. The axis has the last part of the field's name."""
    rows: dict[str, dict[str, Any]] = {f"sgd-{lr}": {"optimizer": {"lr": lr}} for lr in (0.1, 0.2, 0.4, 0.8)}
    rows |= {f"lars-0.1-{trust}": {"optimizer": {"lr": 0.1, "trust_coefficient": trust}} for trust in (1, 2, 3)}
    specs = [
        {"x": "optimizer.lr", "lines": {"sgd": ["sgd-*"]}},
        {"x": "optimizer.trust_coefficient", "lines": {"lars-0.1": ["lars-*"]}},
        {"x": "data.batch_size", "by": "optimizer.lr"},
    ]
    first, second, rest = of_study(rows | {"other": {}}, *specs)
    assert (first.x_label, second.x_label) == ("lr", "trust_coefficient")
    assert [list(chart.series[0].x) for chart in (first, second, rest)] == [[0.1, 0.2, 0.4, 0.8], [1, 2, 3], ["other"]]
    assert rest.title == "m of the other rows"
    assert first.series[0].low is None and "bands" not in first.note
    assert first.note.startswith("sgd: ") and second.note.startswith("lars-0.1: "), "one line has no legend"


def test_rows_without_a_number_are_on_no_line() -> None:
    """Runs that all diverged are in the list."""
    rows: dict[str, dict[str, Any]] = {f"sgd-{lr}": {"optimizer": {"lr": lr}} for lr in (0.1, 0.2, 0.4)}
    spec = {"x": "optimizer.lr", "lines": {"all": ["*"]}}
    diverged: dict[str, dict[str, Any]] = {f"lars-{size}": {"optimizer": {"lr": size}} for size in (1, 2, 3, 4)}
    first, rest = of_study(rows | diverged, spec, num_seeds=dict.fromkeys(diverged, 0))
    assert (first.kind, first.x_label, rest.kind, list(rest.series[0].x)) == ("lines", "lr", "dots", list(diverged))


def test_many_lines_of_a_study_are_told_apart() -> None:
    """No two have both the same colour and the same dash, and bands that would hide each other are left out."""
    lines = [
        {"row": f"{rule}-{size}", "metric": "m", "published": None, "config": {"size": size},
         "measured": [{"num_seeds": 2, "mean": 1.0 * size, "min": 0.0, "max": 9.0}]}
        for rule in "abcdefghij" for size in (1, 2, 4)
    ]  # fmt: skip
    (many,) = study_charts(comparison_of(lines, RULES), ["measured"])
    drawn = [(color_of(series, number), dash_of(series, number)) for number, series in enumerate(many.series)]
    assert len(set(drawn)) == len(drawn) == 10
    assert all(series.low is series.high is None for series in many.series) and "bands" not in many.note
    (few,) = study_charts(comparison_of(lines[:9], RULES), ["measured"])
    assert all(series.low == [0.0] * 3 for series in few.series) and "bands" in few.note
    for line in lines[18:]:
        line["measured"][0]["num_seeds"] = 1
    (some,) = study_charts(comparison_of(lines, RULES), ["measured"])
    assert [series.low is not None for series in some.series] == [True] * 6 + [False] * 4, "one seed has no band"
    two = [{**line, "measured": [line["measured"][0] | {"num_seeds": count} for count in (3, 1)]} for line in lines[:3]]
    (pair,) = study_charts(comparison_of(two, RULES), ["cpu", "full"])
    assert [series.low is not None for series in pair.series] == [True, False], "of one folder alone"


def test_more_lines_than_colours_of_two_runs() -> None:
    """Each run has its own chart, where lines are told apart as in one of this run alone."""

    def charts(count: int, means: Sequence[float | None]) -> list[Chart]:
        lines = [
            {"row": f"{rule}-{size}", "metric": "m", "published": 5.0, "config": {"size": size},
             "measured": [mean and {"num_seeds": 1, "mean": mean, "min": mean, "max": mean} for mean in means]}
            for rule in "abcdefghij"[:count] for size in (1, 2, 4)
        ]  # fmt: skip
        return study_charts(comparison_of(lines, RULES), ["cpu", "full"][: len(means)])

    assert len(charts(6, [1.0, 2.0])) == len(charts(7, [1.0])) == 1
    first, second = charts(7, [1.0, 2.0])
    assert (first.title, first.note) == (
        "m over size, cpu",
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


def test_each_run_is_drawn_at_its_own_settings() -> None:
    """Also on another line. A number that is on no line is in the list."""

    def charts(spec: dict[str, Any], *configs: dict[str, Any], published: float | None = 5.0) -> list[Chart]:
        measured = [{"num_seeds": 1, "mean": 1.0 * run, "min": 0.0, "max": 9.0} for run in range(len(configs))]
        line = {"row": "a", "metric": "m", "published": published, "config": configs[0], "measured": measured}
        comparison = comparison_of([line], spec) | {"configs": [{"a": config} for config in configs]}
        return study_charts(comparison, ["cpu", "full"])

    def drawn(chart: Chart) -> dict[str, tuple[list[Any], list[Any]]]:
        return {series.name: (list(series.x), list(series.y)) for series in chart.series}

    configs: list[dict[str, Any]] = [{"size": 40, "rule": "sgd"}, {"size": 100, "rule": "lamb"}]
    (chart,) = charts({"x": "size", "lines": {"all": ["*"]}}, *configs)
    assert drawn(chart) == {"all, published": ([40], [5]), "all, cpu": ([40], [0]), "all, full": ([100], [1])}
    assert chart.ticks == [40, 100]
    (chart,) = charts({"x": "size", "by": "rule"}, *configs, published=None)
    assert drawn(chart) == {"sgd, cpu": ([40], [0]), "lamb, full": ([100], [1])}
    chart, rest = charts({"x": "size", "lines": {"all": ["*"]}}, {}, configs[1])
    assert drawn(chart) == {"all, full": ([100], [1])}
    assert drawn(rest) == {"published": (["a"], [5]), "cpu": (["a"], [0]), "full": (["a"], [1])}


RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize("name", ["batch-size-cifar10", "saddle-escape"])
def test_committed_studies_have_lines(name: str) -> None:
    """Their manifests, of an older version, do not say what their charts are over, and the studies do."""
    (comparison,) = compare([RESULTS / name])
    chart = study_charts(comparison, ["measured"])[0]
    assert chart.kind == "lines" and chart.log_x and " over " in chart.title


@pytest.mark.parametrize("name", study.STUDIES.names())
def test_all_lines_of_a_study_have_several_values(name: str) -> None:
    """At each scale with several of their rows, each value once."""
    loaded = study.find_study(name)
    configs = {row.name: row.config("full").to_dict() for row in loaded.rows.values()}
    for spec in loaded.charts:
        for line, points in lines_of(spec, configs).items():
            values = [value for value, _ in points]
            assert len(set(values)) == len(values) > 1, (spec["x"], line, points)
