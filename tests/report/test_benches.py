"""Charts and tables of bench results on the page, from rows as the benches write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpcore.display.chart import Chart
from ddpcore.report.page import bench_section, page_of, sections_of
from ddpcore.report.sources import Section, read_bench, read_sources
from helpers.ranks import ROOT

HERE = {
    "device": "a CPU", "cores": 2, "threads_per_rank": 1, "threads": 2, "torch": "2.13", "ddpcore": "0.2",
    "commit": None, "backend": "gloo", "backend_reason": "ranks on the CPU", "transport": "shm",
    "transport_reason": "one host", "oversubscribed": False, "notes": [], "dtype": "float32",
}  # fmt: skip


def times(middle: float) -> dict[str, float]:
    return {"p20": 0.5 * middle, "p50": middle, "p80": 2.0 * middle}


def section_of(**result: Any) -> Section:
    section = bench_section("b.json", {"environment": HERE, **result})
    assert not section.problems
    return section


def bars(chart: Chart) -> list[dict[str, Any]]:
    """The value of each bar; each has a place of its own."""
    for series in chart.series:
        assert len(set(series.x)) == len(series.x), "two bars have one name"
    return [dict(zip(series.x, series.y, strict=True)) for series in chart.series]


DEMO = {
    "learners": 2, "batch_size": 20, "steps": 20, "seeds": 2, "failed_above_pct": 20.0, "rows": [
        {"lr": lr, "strategy": strategy, "test_error_pct": errors, "median_pct": sum(errors) / 2,
         "num_failed": sum(error > 20 for error in errors)}
        for lr, strategy, errors in ((0.3, "ssgd", [4.0, 6.0]), (0.3, "dpsgd", [5.0, 5.0]), (1.2, "ssgd", [90.0, 88.0]),
                                     (1.2, "dpsgd", [6.0, 8.0]))
    ],
}  # fmt: skip


def test_the_demo(tmp_path: Path) -> None:
    section = section_of(**DEMO)
    assert section.lines == [
        "At learning rate 1.2, 2 of 2 runs of SSGD fail (test error above 20 %), and 0 of DPSGD: it averages weights, "
        "not gradients."
    ]
    assert list(section.tables[0].rows[2]) == ["1.2", "ssgd", "89.0", "88.0 to 90.0", "2 of 2"]
    (chart,) = section.charts
    ssgd, ssgd_runs, dpsgd, _ = chart.series
    assert (ssgd.x, ssgd.y) == ([0.3, 1.2], [5.0, 89.0])
    assert (ssgd_runs.x, ssgd_runs.y) == ([0.3, 0.3, 1.2, 1.2], [4.0, 6.0, 90.0, 88.0])
    assert dpsgd.y == [5.0, 7.0]
    for library in ("jinja2", "matplotlib"):
        pytest.importorskip(library)
    (tmp_path / "demo.json").write_text(json.dumps(DEMO))
    assert "runs of SSGD fail" in page_of(sections_of(read_sources([tmp_path / "demo.json"])))


def test_predictions_of_equal_buckets_have_a_bar_each() -> None:
    """A small model has one bucket at each of two sizes."""
    rows = [
        {"strategy": strategy, "topology": topology, "bucket_mb": size, "num_buckets": num, "transport": "shm",
         "comm_ms": 1.0, "predicted_ms": predicted, "measured_ms": times(2 * predicted), "error_pct": -50.0}
        for strategy, topology, size, num, predicted in (
            ("ssgd", None, 1.0, 1, 3.0), ("ssgd", None, None, 1, 4.0), ("dpsgd", "ring", None, None, 5.0))
    ]  # fmt: skip
    compute = {"forward": 1.0, "backward": 1.0, "update": 1.0}
    section = section_of(model="mlp", world_size=2, batch_size=8, compute_ms=compute, rows=rows)
    predicted, measured = bars(section.charts[0])
    assert predicted == {"ssgd 1 MiB shm": 3.0, "ssgd one bucket shm": 4.0, "dpsgd ring shm": 5.0}
    assert measured == {name: 2 * value for name, value in predicted.items()}


def test_the_bandwidth_of_a_step_is_shown_once() -> None:
    """A step that is compared twice is in the chart as in the table: with the times of its first comparison."""
    comparisons = ["FusedSGD / torch SGD", "peer / FusedSGD"]
    rows = [
        {"comparison": comparison, "implementation": name, "list": "a", "ms": times(1.0), "ratio": times(0.5),
         "bytes_per_param": 20 if name == "FusedSGD" else None, "bytes_per_param_uncached": 20, "gb_per_s": speed,
         "copy_gb_per_s": 25.0}
        for comparison, name, speed in ((comparisons[0], "FusedSGD", 12.5), (comparisons[0], "torch SGD", None),
                                        (comparisons[1], "peer", None), (comparisons[1], "FusedSGD", 99.0))
    ]  # fmt: skip
    lists = [{"list": "a", "title": "LeNet-5", "parameters": 1, "num_tensors": 1}]
    ratios, speeds = section_of(lists=lists, comparisons=comparisons, rows=rows).charts
    assert bars(speeds) == [{"FusedSGD, LeNet-5": 12.5}, {"FusedSGD, LeNet-5": 25.0}]
    assert bars(ratios) == [{f"{comparison}, LeNet-5": 0.5 for comparison in comparisons}]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks" / "results").glob("optim_*.json")), ids=lambda one: one.stem
)
def test_records_of_optimizer_steps_stay_readable(path: Path) -> None:
    section = bench_section(path.name, read_bench(path))
    ratios, speeds = section.tables
    assert ratios.rows and speeds.rows and len(section.charts) == 2


def test_bucket_sizes_are_in_order() -> None:
    """Strategies may have other sizes: those that build the same buckets are measured once."""
    rows = [
        {"strategy": strategy, "bucket_mb": size, "bucket_bytes": [8], "sent_bytes": [8], "step_ms": times(ms),
         "comm_ms": ms, "exposed_comm_ms": ms, "overlap_pct": 0.0}
        for strategy, size, ms in (("ddp", 1.0, 1.0), ("ddp", None, 3.0), ("ssgd", 0.25, 4.0), ("ssgd", 1.0, 5.0),
                                   ("ssgd", 25.0, 6.0))
    ]  # fmt: skip
    section = section_of(model="mlp", world_size=2, batch_size=8, rounds=3, recommended=[], rows=rows)
    for series in (*section.charts[0].series, *section.charts[1].series):
        assert series.x == ["0.25 MiB", "1 MiB", "25 MiB", "one bucket"]
    ddp, ssgd = section.charts[0].series
    assert ddp.y == [None, 1.0, None, 3.0] and ssgd.y == [4.0, 5.0, 6.0, None]
    assert ddp.high == [None, 2.0, None, 6.0]
