"""Metrics and curves from the statistics in a record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpcore.experiments.compare import outcome_of
from ddpcore.experiments.metrics import MAX_POINTS, METRICS, curves_of, metrics_of
from ddpcore.records.study import CURVES
from ddpcore.training import RunRecord, TrainConfig

CONFIG = TrainConfig.from_dict(
    {
        "model": "saddle",
        "data": "saddle",
        "run": {"steps": 100, "statistics_every": 10, "escape_loss": 0.55},
        "strategy": {"name": "ssgd", "learners": 2},
    }
).to_dict()


def line(step: int, effective_lr: float | None, loss: float, valid: bool = True) -> dict[str, Any]:
    noises = {"noise": step * 1.0, "landscape_noise": 0.25, "landscape_upright": 0.125}
    noises |= {"hessian_noise": 0.5} if step % 20 else {"hessian_noise": None}
    moves = {"lr": 0.5, "effective_lr": effective_lr, "full_loss": loss, "grad_squared": 100.0 / step, **noises}
    return {"kind": "statistics", "step": step, "valid": valid, "dynamics": moves}


def record(lines: list[dict[str, Any]], final: dict[str, Any] | None = None) -> RunRecord:
    header = {"config": CONFIG, "total_steps": 100, "num_classes": 2, "num_parameters": 2}
    epoch = {"epoch": 1, "train_loss": 0.3, "split": "test", "accuracy": 0.75, "seconds": 2.0}
    ended = {"diverged": False, "step": 100, **(final or {})}
    return RunRecord(path=Path(), header=header, resumed=[], epochs=[epoch], statistics=lines, final=ended)


def test_the_hessian_along_a_run() -> None:
    lines = [
        {"step": 10 * k, "problem": None, "largest": [k * 1.0, 0.5], "disagreement": [0.01 * k, 0.01],
         "noise_shares": None}
        for k in range(1, 11)
    ]  # fmt: skip
    lines[9] |= {"problem": "not finite", "largest": [None, None], "disagreement": None}
    of_run = record([])
    of_run.hessian.extend(lines)
    seen = metrics_of(of_run)
    assert (seen["sharpness_late"], seen["sharpness_max"]) == (9.0, 9.0), "only step 90 is late and known"
    assert seen["disagreement_top_late"] == pytest.approx(0.1)
    assert seen["noise_top_late"] is None
    assert metrics_of(record([]))["sharpness_max"] is None


def test_early_late_and_escape() -> None:
    lines = [line(10 * k, 0.05 * k, 1 - 0.1 * k) for k in range(1, 11)]
    seen = metrics_of(record(lines))
    assert set(seen) == set(METRICS)
    assert seen["effective_lr_early"] == pytest.approx((10 * 0.1 + 5 * 0.2) / 15), (
        "steps 10 and 20, in units of the rate"
    )
    assert seen["effective_lr_late"] == pytest.approx(2 / (1 / 0.9 + 1)), "steps 90 and 100: weighed by |g|^2"
    assert seen["effective_lr_min"] == pytest.approx(0.1)
    assert (seen["noise_early"], seen["noise_late"]) == (15.0, 95.0)
    assert (seen["landscape_noise_early"], seen["landscape_noise_late"]) == (0.25, 0.25)
    assert (seen["landscape_upright_early"], seen["landscape_upright_late"]) == (0.125, 0.125)
    assert (seen["hessian_noise_early"], seen["hessian_noise_late"]) == (0.5, 0.5), "where it was measured"
    assert seen["full_loss"] == pytest.approx(0.0)
    assert seen["escape_step"] == 50, "0.5 is the first below 0.55"
    assert seen["error_pct"] == 25.0


def test_the_noise_scale_is_that_of_the_last_valid_record() -> None:
    lines = [line(10 * k, 0.5, 0.5, valid=k < 4) | {"whole": {"noise_scale": 100.0 * k}} for k in (1, 2, 3, 4)]
    assert metrics_of(record(lines))["noise_scale"] == 300.0
    infinite = line(10, 0.5, 0.5) | {"whole": {"noise_scale": None}}
    assert metrics_of(record([infinite]))["noise_scale"] is None
    assert metrics_of(record([]))["noise_scale"] is None


def test_missing_statistics() -> None:
    """No statistics, invalid statistics, and a loss that never decreased."""
    nothing = metrics_of(record([]))
    assert nothing["effective_lr_early"] is nothing["escape_step"] is nothing["full_loss"] is None
    broken = metrics_of(record([line(10, None, 0.1), line(20, 0.5, 0.1, valid=False), line(30, 0.4, 0.9)]))
    assert broken["escape_step"] is None and broken["effective_lr_early"] is None
    assert broken["effective_lr_min"] == pytest.approx(0.8)


def test_flatness() -> None:
    flat = {"hessian_eigenvalue": 3.0, "relative_eigenvalue": 2.0, "relative_trace": 9.0, "loss_increase": 0.1}
    seen = metrics_of(record([], {"flatness": {**flat, "loss": 0.5}}))
    assert {name: seen[name] for name in flat} == flat
    assert metrics_of(record([], {"flatness": None}))["relative_trace"] is None


def test_curves() -> None:
    lines = [line(k, 0.123456, 1.0) for k in range(1, 10 * MAX_POINTS + 2)]
    curves = curves_of(record(lines))
    assert {len(curves[name]) for name in ("step", *CURVES["step"])} == {len(lines[::11])}
    assert len(curves["step"]) <= MAX_POINTS
    assert curves["step"][:2] == [1.0, 12.0] and curves["effective_lr"][0] == 0.2469
    one = record([])
    assert curves_of(one) == {"epoch": [1.0], "train_loss": [0.3], "evaluated epoch": [1.0], "accuracy_pct": [75.0]}
    one.epochs[:] = epochs_of([None, *(0.123456 + number for number in range(2 * MAX_POINTS))])
    curves = curves_of(one)
    assert (curves["epoch"][:2], curves["train_loss"][:2]) == ([2.0, 4.0], [0.1235, 2.123])
    assert len(curves["epoch"]) == len(curves["train_loss"]) == MAX_POINTS and "step" not in curves
    tested = [{"accuracy": 0.123456, "split": "test"}, {}, {"accuracy": 0.5, "split": "validation"}]
    one.epochs[:] = [epoch | more for epoch, more in zip(epochs_of([0.3] * 3), tested, strict=True)]
    found = curves_of(one)
    assert (found["evaluated epoch"], found["accuracy_pct"], found["epoch"]) == ([1.0], [12.35], [1.0, 2.0, 3.0])


def epochs_of(losses: list[float | None]) -> list[dict[str, Any]]:
    return [{"epoch": place, "train_loss": loss, "seconds": 1.0} for place, loss in enumerate(losses, 1)]


def test_losses_of_epochs() -> None:
    names = ("loss_drop", "largest_rise", "epochs_rising", "epochs_to_learn")
    one = record([])
    assert [metrics_of(one)[name] for name in names] == [None, None, None, 1], "one epoch, below 0.9 ln 2"
    one.epochs[:] = epochs_of([0.75, 0.8, 0.625, 0.9, 0.5, None])
    assert [metrics_of(one)[name] for name in names] == [0.25, pytest.approx(0.275), 2, 5], "0.9 ln 2 is 0.624"
    one.epochs[:] = epochs_of([0.75, 0.7, 0.7])
    assert [metrics_of(one)[name] for name in names] == [pytest.approx(0.05), 0.0, 0, None], "an equal loss is no rise"
    one.header["num_classes"] = None
    assert metrics_of(one)["epochs_to_learn"] is None


def test_a_validation_split_is_kept_apart_from_the_test_split() -> None:
    one = record([], {"test": {"accuracy": 0.25}})
    one.epochs[-1]["split"] = "validation"
    seen = metrics_of(one)
    assert (seen["validation_accuracy_pct"], seen["accuracy_pct"]) == (75.0, 25.0)
    assert metrics_of(record([]))["validation_accuracy_pct"] is None


def test_numbers_of_a_diverged_run_do_not_count() -> None:
    """Except metrics that define a value for a diverged run."""
    metrics = {"train_loss": 1e7, "seconds": 3.0, "loss_or_chance": 2.3}
    assert outcome_of({"metrics": metrics, "diverged": False}).metrics == metrics
    assert outcome_of({"metrics": metrics, "diverged": True}).metrics == {
        "train_loss": None, "seconds": None, "loss_or_chance": 2.3,
    }  # fmt: skip
