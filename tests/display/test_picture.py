"""Plots into files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpcore.display import chart, picture
from ddpcore.display.chart import Chart, Series, check_plot, network

CHARTS = [
    Chart(title="Loss", x_label="steps", y_label="loss", series=[Series(name="ddp", x=[1, 2], y=[2.0, 1.0])]),
    *(network(f"ring {size}", size, [(0, 1), (1, 2)]) for size in (3, 4, 5, 6)),
]


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_files(suffix: str, magic: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"out{suffix}"
    check_plot(path)
    picture.plot_charts(CHARTS, path, "A title")
    assert path.read_bytes().startswith(magic)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_names_in_the_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture.plot_charts(CHARTS, tmp_path / "out.svg", "A title")
    text = (tmp_path / "out.svg").read_text()
    assert all(f"<!-- {word}" in text for word in ("A title", "Loss", "steps", "ring 6"))


def test_networks_stand_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures: list[Any] = []
    monkeypatch.setattr(picture.Figure, "savefig", lambda figure, *given, **more: figures.append(figure))
    picture.plot_charts(CHARTS, tmp_path / "out.svg", "A title")
    places = [axes.get_subplotspec() for axes in figures[0].axes]
    assert [(place.rowspan.start, place.colspan.start) for place in places] == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert len(places[0].colspan) == 3


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"neither \.png nor \.svg"):
        check_plot(Path("out.pdf"))
    check_plot(None)
    monkeypatch.setattr(chart, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'ddpcore\[report\]'"):
        check_plot(Path("out.png"))
