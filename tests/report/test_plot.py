"""Plots into files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpcore.report import plot, plot_option
from ddpcore.report.chart import Chart, Series
from ddpcore.report.plot_option import check_plot
from ddpcore.report.runs import network

CHARTS = [
    Chart(title="Loss", x_label="steps", y_label="loss", series=[Series(name="ddp", x=[1, 2], y=[2.0, 1.0])]),
    *(network(f"ring {size}", size, [(0, 1), (1, 2)]) for size in (3, 4, 5, 6)),
]


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_files(suffix: str, magic: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"out{suffix}"
    check_plot(path)
    plot.plot_charts(CHARTS, path, "A title")
    assert path.read_bytes().startswith(magic)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_names_in_the_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.plot_charts(CHARTS, tmp_path / "out.svg", "A title")
    text = (tmp_path / "out.svg").read_text()
    assert all(f"<!-- {word}" in text for word in ("A title", "Loss", "steps", "ring 6"))


def test_networks_stand_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures: list[Any] = []
    monkeypatch.setattr(plot, "save", lambda figure, path: figures.append(figure))
    plot.plot_charts(CHARTS, tmp_path / "out.svg", "A title")
    places = [axes.get_subplotspec() for axes in figures[0].axes]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert len(places[0].colspan) == 3


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
        check_plot(Path("out.pdf"))
    check_plot(None)
    monkeypatch.setattr(plot_option, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'ddpcore\[report\]'"):
        check_plot(Path("out.png"))
