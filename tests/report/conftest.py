"""A small run folder, made up, for tests of the page."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ddpcore.display.chart import Chart
from ddpcore.training import TrainConfig

Make = Callable[..., Path]


def lines_of(num_steps: int = 6, seed: int = 0, accuracy: float = 0.6, **header: Any) -> list[dict[str, Any]]:
    """The lines of a record: a header, an epoch and statistics for each second step, and an end."""
    config = TrainConfig.from_dict(
        {"run": {"steps": num_steps, "seed": seed}, "strategy": {"learners": 2, "name": "dpsgd", "topology": "ring"}}
    ).to_dict()
    lines: list[dict[str, Any]] = [
        {"kind": "run", "config": config, "total_steps": num_steps, "ranks": 2, "device": "a CPU", "cores": 2,
         "communication": "shared memory", "torch": "2.13", "python": "3.11", "ddpcore": "0.2.0", "commit": "abc",
         "date": "2026-01-01", "topology": {"num_learners": 2, "spectral_gap": 0.5, "edges": [[0, 1], [1, 0]]},
         **header},
    ]  # fmt: skip
    for step in range(2, num_steps + 1, 2):
        lines.append({
            "kind": "statistics", "step": step, "valid": True,
            "whole": {"noise_scale": 100.0 + step, "interval": [90.0 + step, 110.0 + step]},
            "dynamics": {"lr": 0.1, "effective_lr": 0.05, "full_loss": 1.0 / step}, "spread": None,
        })  # fmt: skip
        lines.append({
            "kind": "epoch", "epoch": step // 2, "step": step, "train_loss": 1.0 / step + 0.01 * seed,
            "consensus_distance": 0.1, "total_seconds": 0.5 * step, "split": "test", "loss": 2.0 / step,
            "accuracy": 0.1 * step,
        })  # fmt: skip
    end = {
        "kind": "end",
        "step": num_steps,
        "diverged": False,
        "accuracy": accuracy,
        "total_seconds": 3.0,
        "flatness": None,
    }
    return [*lines, end]


@cache
def drawing(name: str) -> Callable[[Chart], Any]:
    """A function of the package that draws a chart, which draws equal charts once: it takes most of the time."""
    from ddpcore.display import picture

    draw, drawn = getattr(picture, name), {}

    def once(chart: Chart) -> Any:
        key = pickle.dumps(chart)
        if key not in drawn:
            drawn[key] = draw(chart)
        return drawn[key]

    return once


@pytest.fixture(autouse=True)
def equal_charts_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("matplotlib") is not None and find_spec("jinja2") is not None:
        for place in ("page.svg_of", "page.pdf_of"):
            monkeypatch.setattr(f"ddpcore.report.{place}", drawing(place.partition(".")[2]))


@pytest.fixture
def make_run(tmp_path: Path) -> Make:
    """Writes a run folder: its name, then arguments of :func:`lines_of`; ``steps`` are the lines of each rank."""

    def make(name: str = "run", steps: dict[int, list[dict[str, Any]]] | None = None, **more: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines_of(**more))
        (folder / "record.jsonl").write_text(text)
        for rank, lines in (steps or {}).items():
            (folder / "steps").mkdir(exist_ok=True)
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / "steps" / f"rank-{rank}.jsonl").write_text(text)
        return folder

    return make


@pytest.fixture
def recorded_steps() -> dict[int, list[dict[str, Any]]]:
    """Steps of two ranks. Rank 1 computes longer, and rank 0 waits for it."""
    return {
        rank: [
            {"step": step, "learners": [rank], "loss": [1.0 / step + rank], "seconds": 0.03,
             "compute": 0.01 + 0.02 * rank, "overlapped": 0.005,
             "forward": 0.004, "backward": 0.005 + 0.02 * rank, "exposed": 0.02 - 0.02 * rank,
             "waits": {str(1 - rank): 0.02 - 0.02 * rank}}
            for step in range(1, 7)
        ]
        for rank in (0, 1)
    }  # fmt: skip
