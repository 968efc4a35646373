"""Plots into files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ddpcore.report import plot

ROWS = [
    {
        "strategy": strategy,
        "bucket_mb": size,
        "step_ms": {"p20": 1.0, "p50": 2.0, "p80": 3.0},
        "comm_ms": 4.0,
        "exposed_comm_ms": 1.0,
    }
    for strategy in ("ddp", "ssgd")
    for size in (0.25, 25.0, None if strategy == "ddp" else math.inf)
]
RESULT = {"model": "vit", "world_size": 4, "batch_size": 32, "rows": ROWS}


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_files(suffix: str, magic: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"out{suffix}"
    plot.check_plot(path)
    plot.plot_buckets(RESULT, path)
    assert path.read_bytes().startswith(magic)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_names_in_the_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.plot_buckets(RESULT, tmp_path / "out.svg")
    text = (tmp_path / "out.svg").read_text()
    for word in ("0.25 MiB", "25 MiB", "one bucket", "ddp, exposed", "ssgd, alone", "vit, 4 ranks"):
        assert f"<!-- {word}" in text


SEEDS = [{"step": [0, 10], "effective_lr": [1.0, seed], "loss": [2.0, 1.0], "noise": [0.1, 0.2]} for seed in range(6)]
COMPARISON: dict[str, Any] = {
    "title": "A study", "metrics": ["error_pct"],
    "lines": [{"row": "a", "metric": "error_pct", "published": 3.0, "measured": [
        {"num_seeds": 6, "mean": 2.0, "min": 1.0, "max": 4.0}]}],
    "curves": [{"a": SEEDS}],
}  # fmt: skip


def test_curves_are_medians_between_percentiles() -> None:
    figure = pytest.importorskip("matplotlib.figure")
    axes = figure.Figure().subplots()
    plot._draw_curves(axes, [*SEEDS, {**SEEDS[0], "step": [0, 20]}], "effective_lr", "a")
    assert axes.lines[0].get_xydata().tolist() == [[0, 1], [10, 2.5], [20, 0]], "step 20 is of one seed alone"
    corners = {tuple(corner) for corner in axes.collections[0].get_paths()[0].vertices.round(6).tolist()}
    assert {(10, 1), (10, 4), (20, 0)} <= corners


def test_a_comparison_gives_the_same_file_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("first.svg", "second.svg"):
        plot.plot_comparison(COMPARISON, tmp_path / name, ["measured"])
    text = (tmp_path / "first.svg").read_text()
    assert text == (tmp_path / "second.svg").read_text()
    assert all(words in text for words in ("error_pct", "training loss of the mean", "noise strength"))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"neither \.png nor \.svg"):
        plot.check_plot(Path("out.pdf"))
    monkeypatch.setattr(plot, "Figure", None)
    with pytest.raises(ValueError, match=r"pip install 'ddpcore\[report\]'"):
        plot.check_plot(Path("out.png"))
