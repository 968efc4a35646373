"""The metrics of studies: their names, what they mean, and their numbers of one run."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ddpcore.options.fields import get
from ddpcore.records.run import RunRecord
from ddpcore.records.study import CURVES

SHARE = 0.2  # the first and the last fifth of a run are "early" and "late"
MAX_POINTS = 60  # of a curve
LEARNED = 0.9  # of ln(classes), the loss of guessing: below, a run has begun to learn
NOISES = ("noise", "landscape_noise", "landscape_upright", "hessian_noise")
FLATNESS = ("hessian_eigenvalue", "relative_eigenvalue", "relative_trace", "loss_increase")


def counts_diverged(metric: str) -> bool:
    """Whether the metric defines a value for a run that diverged, which may then be averaged."""
    return "or_chance" in metric


def metrics_of(record: RunRecord, recoveries: int = 0) -> dict[str, float | None]:
    """Every metric of a finished run; None if the run does not have it. ``recoveries`` is the metric of that name."""
    last: dict[str, Any] = record.epochs[-1] if record.epochs else {}
    on_test = last if last.get("split") == "test" else record.final.get("test") or {}
    on_validation = last.get("accuracy") if last.get("split") == "validation" else None
    best = record.final.get("best_accuracy")
    accuracy, seconds = on_test.get("accuracy"), sum(epoch["seconds"] for epoch in record.epochs)
    accuracy_pct = None if accuracy is None else 100 * accuracy
    classes = record.header.get("num_classes") if record.final["diverged"] else None
    target = get(record.header["config"], "run.target")
    return {
        "train_loss": last.get("train_loss"),
        "test_loss": on_test.get("loss"),
        "accuracy": accuracy,
        "accuracy_pct": accuracy_pct,
        "error_pct": None if accuracy is None else 100 * (1 - accuracy),
        "accuracy_or_chance_pct": 100 / classes if classes else accuracy_pct,
        "loss_or_chance": math.log(classes) if classes else on_test.get("loss"),
        "best_accuracy_pct": None if best is None else 100 * best,
        "validation_accuracy_pct": None if on_validation is None else 100 * on_validation,
        **{name: on_test.get(name) for name in ("precision", "recall", "f1", "specificity")},
        "seconds": seconds,
        "seconds_to_target": None if target is None or best is None or best < target else seconds,
        "steps": record.final["step"],
        "parameters_mb": 4 * record.header["num_parameters"] / 2**20,
        "total_variation": record.header.get("total_variation"),
        "consensus_distance": last.get("consensus_distance"),
        "recoveries": recoveries,
        **_losses(record),
        **_statistics(record),
        **_hessian(record),
        **{name: (record.final.get("flatness") or {}).get(name) for name in FLATNESS},
    }


def _losses(record: RunRecord) -> dict[str, float | None]:
    """Metrics from the mean training losses of epochs; None where there are too few."""
    known, classes = _known(record), record.header.get("num_classes") or 1
    losses = [epoch["train_loss"] for epoch in known]
    rises = [after - before for before, after in pairwise(losses)]
    learned = (epoch["epoch"] for epoch in known if epoch["train_loss"] < LEARNED * math.log(classes))
    return {
        "loss_drop": losses[0] - losses[-1] if rises else None,
        "largest_rise": max(0.0, *rises) if rises else None,
        "epochs_rising": sum(rise > 0 for rise in rises) if rises else None,
        "epochs_to_learn": next(learned, None),
    }


def _known(record: RunRecord) -> list[dict[str, Any]]:
    """Epochs with a finite training loss."""
    return [epoch for epoch in record.epochs if epoch["train_loss"] is not None]


def _statistics(record: RunRecord) -> dict[str, float | None]:
    """Metrics from the noise statistics; None if there are none."""
    lines, total = _measured(record), record.header["total_steps"]
    scales = [(line.get("whole") or {}).get("noise_scale") for line in record.statistics if line["valid"]]
    early = [line for line in lines if line["step"] <= SHARE * total]
    late = [line for line in lines if line["step"] > (1 - SHARE) * total]
    level = get(record.header["config"], "run.escape_loss")
    below = [line["step"] for line in lines if level is not None and line["loss"] < level]
    return {
        "effective_lr_early": _rate(early),
        "effective_lr_late": _rate(late),
        "effective_lr_min": min((line["effective_lr"] for line in lines), default=None),
        **{f"{name}_early": _mean([line[name] for line in early if line[name] is not None]) for name in NOISES},
        **{f"{name}_late": _mean([line[name] for line in late if line[name] is not None]) for name in NOISES},
        "noise_scale": scales[-1] if scales else None,
        "full_loss": lines[-1]["loss"] if lines else None,
        "escape_step": below[0] if below else None,
    }


def _hessian(record: RunRecord) -> dict[str, float | None]:
    """Metrics from the Hessian along the run; None if it was not measured."""
    lines = [line for line in record.hessian if line["problem"] is None]
    late = [line for line in lines if line["step"] > (1 - SHARE) * record.header["total_steps"]]
    return {
        "sharpness_late": _mean([line["largest"][0] for line in late]),
        "sharpness_max": max((line["largest"][0] for line in lines), default=None),
        "disagreement_top_late": _mean([sum(line["disagreement"]) for line in late if line["disagreement"]]),
        "penalty_late": _mean([line["penalty"] for line in late if "penalty" in line]),
        "noise_top_late": _mean([sum(line["noise_shares"]) for line in late if line["noise_shares"]]),
    }


def curves_of(record: RunRecord) -> dict[str, list[float]]:
    """Statistics of steps, losses and test accuracies of epochs, for plots: at most MAX_POINTS, of four digits."""
    curves: dict[str, list[float]] = {}
    tested = [
        {"evaluated epoch": epoch["epoch"], "accuracy_pct": 100 * epoch["accuracy"]}
        for epoch in record.epochs
        if epoch.get("split") == "test" and epoch.get("accuracy") is not None
    ]
    for (x, names), lines in zip(CURVES.items(), (_measured(record), _known(record), tested), strict=True):
        chosen = lines[:: max(1, math.ceil(len(lines) / MAX_POINTS))]
        curves |= {name: [float(f"{line[name]:.4g}") for line in chosen] for name in (x, *names) if chosen}
    return curves


def _measured(record: RunRecord) -> list[dict[str, float]]:
    """Statistics with finite numbers; effective_lr is in units of the learning rate."""
    valid = [(line["step"], line["dynamics"]) for line in record.statistics if line["valid"] and line["dynamics"]]
    return [
        {
            "step": step,
            "effective_lr": dynamics["effective_lr"] / dynamics["lr"],
            "loss": dynamics["full_loss"],
            **{name: dynamics.get(name) for name in ("grad_squared", *NOISES)},
        }
        for step, dynamics in valid
        if dynamics["lr"] and None not in (dynamics["effective_lr"], dynamics["full_loss"])
    ]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rate(lines: Sequence[dict[str, float]]) -> float | None:
    """Sum of g_a.g over sum of |g|^2. The mean of the ratios would be dominated by steps with small g."""
    squares = sum(line["grad_squared"] for line in lines)
    return sum(line["effective_lr"] * line["grad_squared"] for line in lines) / squares if squares > 0 else None


_NO_RUN = RunRecord(
    path=Path(), resumed=[], epochs=[], statistics=[], final={"diverged": False, "step": 0},
    header={"config": {}, "num_parameters": 0, "total_steps": 0},
)  # fmt: skip
METRICS = tuple(metrics_of(_NO_RUN))
"""Numbers of a run. docs/experiments.md says what each is, and docs/noise_statistics.md explains the symbols."""
