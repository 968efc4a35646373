"""Metrics of a run, from a made-up record."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from ddpcore.experiments.metrics import METRICS, metrics_of
from ddpcore.training import RunRecord


def record(*, diverged: bool = False, target: float | None = None) -> RunRecord:
    scores = {"split": "test", "loss": 1.5, "accuracy": 0.6, "precision": 0.1, "recall": 0.2, "f1": 0.3}
    epochs: list[dict[str, Any]] = [
        {"epoch": 1, "seconds": 2.0, "train_loss": 2.0, **scores, "accuracy": 0.5},
        {"epoch": 2, "seconds": 3.0, "train_loss": 1.0, **({} if diverged else scores)},
    ]
    config = {"run": {"target": target, "escape_loss": None}}
    header = {"total_steps": 70, "num_classes": 4, "num_parameters": 2**19, "config": config}
    final = {"diverged": diverged, "best_accuracy": 0.6, "step": 70}
    return RunRecord(path=Path("record.jsonl"), header=header, resumed=[], epochs=epochs, statistics=[], final=final)


def test_every_metric_has_a_meaning() -> None:
    assert set(metrics_of(record())) == set(METRICS)
    page = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()
    explained = set(re.findall(r"`(\w+)`", page))
    assert [name for name in METRICS if not {name, re.sub("_(early|late)$", "", name)} & explained] == []


def test_a_diverged_run_counts_as_chance_for_metrics_that_define_it() -> None:
    ended, failed = metrics_of(record()), metrics_of(record(diverged=True))
    assert (ended["accuracy_or_chance_pct"], ended["loss_or_chance"]) == (60.0, 1.5)
    assert (failed["accuracy_or_chance_pct"], failed["loss_or_chance"]) == (25.0, math.log(4))
    assert failed["accuracy_pct"] is None and failed["test_loss"] is None


@pytest.mark.parametrize(("target", "seconds"), [(None, None), (0.55, 5.0), (0.6, 5.0), (0.7, None)])
def test_seconds_to_a_target(target: float | None, seconds: float | None) -> None:
    values = metrics_of(record(target=target))
    assert (values["seconds_to_target"], values["seconds"], values["steps"]) == (seconds, 5.0, 70)


def test_size() -> None:
    assert metrics_of(record())["parameters_mb"] == 2.0
