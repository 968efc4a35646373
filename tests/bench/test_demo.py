"""The demo: its result, its sentence, and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpcore.bench import __main__ as bench
from ddpcore.bench import demo
from ddpcore.runtime.launch import World


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """One seed at the learning rate that separates the strategies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "LEARNING_RATES", (1.2,))
        return demo.measure(demo.DemoConfig(seeds=1))


@pytest.mark.slow
def test_dpsgd_trains_where_ssgd_fails(result: dict[str, Any]) -> None:
    errors = {row["strategy"]: row["test_error_pct"] for row in result["rows"]}
    assert errors["dpsgd"][0] < 6
    assert errors["ssgd"][0] > 20
    assert demo.seen(result).startswith("At learning rate 1.2, 1 of 1 runs of SSGD fail")


@pytest.mark.slow
def test_the_plot_and_a_result_without_a_gap(result: dict[str, Any], tmp_path: Path) -> None:
    demo.KIND.draw(result, tmp_path / "demo.svg")
    text = (tmp_path / "demo.svg").read_text()
    assert all(f"<!-- {word}" in text for word in ("SSGD: averages gradients", "5 learners, handwritten digits"))
    (chart,) = demo.charts(result)
    assert [series.y for series in chart.series[::2]] == [[row["median_pct"]] for row in result["rows"]]
    assert [series.y for series in chart.series[1::2]] == [row["test_error_pct"] for row in result["rows"]]
    rows = [row | {"num_failed": 0} for row in result["rows"]]
    assert demo.seen({**result, "rows": rows}) == "No learning rate here separates the two strategies."


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="without torchrun"):
        demo.prepare(demo.DemoConfig(), World(rank=1, world_size=2))
    assert bench.main(["demo", "--plot", "demo.jpg"]) == 2
    assert ".png" in capsys.readouterr().err
    assert bench.main(["demo", "--learners", "1"]) == 2
    assert "--learners" in capsys.readouterr().err
