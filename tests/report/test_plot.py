"""Plots into files."""

from __future__ import annotations

import math
from pathlib import Path

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


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"neither \.png nor \.svg"):
        plot.check_plot(Path("out.pdf"))
    monkeypatch.setattr(plot, "Figure", None)
    with pytest.raises(ValueError, match=r"pip install 'ddpcore\[plot\]'"):
        plot.check_plot(Path("out.png"))
