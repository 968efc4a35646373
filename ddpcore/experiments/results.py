"""The numbers of one run that studies are compared by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ddpcore.engine import RunRecord
from ddpcore.experiments.claims import Outcome

SHARE = 0.2  # of a run, that is early or late
MOST_POINTS = 60  # of a curve
CURVES = ("effective_lr", "loss", "noise")
NOISES = ("noise", "landscape_noise", "landscape_upright")
FLATNESS = ("hessian_eigenvalue", "relative_eigenvalue", "relative_trace", "loss_increase")
METRICS = {
    "train_loss": "mean loss of the last epoch's training steps",
    "test_loss": "mean cross-entropy on the test split",
    "accuracy": "share of the test split, 0 to 1",
    "accuracy_pct": "the same in percent",
    "error_pct": "share of the test split that the model gets wrong, in percent",
    "accuracy_or_chance_pct": "accuracy_pct, or 100 / classes of a run that diverged, as some tables print it",
    "loss_or_chance": "test_loss, or ln(classes) of a run that diverged, as some tables print it",
    "best_accuracy_pct": "of the evaluations, in percent",
    "validation_accuracy_pct": "share of the validation split at the end, in percent, of a run that is evaluated on it",
    "precision": "macro mean over classes, 0 to 1",
    "recall": "macro mean over classes, 0 to 1",
    "f1": "macro mean over classes, 0 to 1",
    "specificity": "macro mean over classes, 0 to 1",
    "seconds": "of training, without evaluation and checkpoints; over an emulated link as they would be there",
    "seconds_to_target": "the same of a run that reached its target accuracy; the others have none",
    "steps": "of the optimizer",
    "parameters_mb": "trained parameters in fp32, in units of 2^20 bytes",
    "consensus_distance": "of the learners at the end",
    "recoveries": "times that a rank died and the run went on from its checkpoint",
    "effective_lr_early": "a_e / a of the measured steps in the first fifth of the run, sum of g_a.g over sum of |g|^2",
    "effective_lr_late": "the same of the last fifth",
    "effective_lr_min": "the smallest of the measured steps",
    "noise_early": "noise strength D, mean over the measured steps of the first fifth of the run",
    "noise_late": "the same of the last fifth",
    "landscape_noise_early": "what the learners' distance adds, D2, in the first fifth",
    "landscape_noise_late": "the same of the last fifth",
    "landscape_upright_early": "what of D2 stands upright on g as D does, and so is a part of D, in the first fifth",
    "landscape_upright_late": "the same of the last fifth",
    "full_loss": "of the mean weights, at the last measured step",
    "escape_step": "the first measured step at which the full loss was below escape_loss",
    "hessian_eigenvalue": "the largest of the Hessian of the training loss at the averaged weights",
    "relative_eigenvalue": "the same of diag|w| H diag|w|: for changes of each weight in proportion to it",
    "relative_trace": "its trace",
    "loss_increase": "mean increase of the training loss where each weight w becomes w (1 + 0.1 x), x standard normal",
}
"""What a row may be compared by; docs/noise_statistics.md has the symbols.

Of a run that chose on the validation split, scores are those of the test split.
"""


def counts_diverged(metric: str) -> bool:
    """Whether the number of a run that diverged is one to average: others are those of where it happened to end."""
    return "or_chance" in metric


def metrics_of(record: RunRecord, recoveries: int = 0) -> dict[str, float | None]:
    """Every metric of a finished run; None is what it has not."""
    last: dict[str, Any] = record.epochs[-1] if record.epochs else {}
    on_test = last if last.get("split") == "test" else record.final.get("test") or {}
    on_validation = last.get("accuracy") if last.get("split") == "validation" else None
    best = record.final.get("best_accuracy")
    accuracy, seconds = on_test.get("accuracy"), sum(epoch["seconds"] for epoch in record.epochs)
    accuracy_pct = None if accuracy is None else 100 * accuracy
    classes = record.header.get("num_classes") if record.final["diverged"] else None
    target = record.header["config"].get("target")
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
        "consensus_distance": last.get("consensus_distance"),
        "recoveries": recoveries,
        **_statistics(record),
        **{name: (record.final.get("flatness") or {}).get(name) for name in FLATNESS},
    }


def _statistics(record: RunRecord) -> dict[str, float | None]:
    """What the statistics say; None where there are none."""
    lines, total = _measured(record), record.header["total_steps"]
    early = [line for line in lines if line["step"] <= SHARE * total]
    late = [line for line in lines if line["step"] > (1 - SHARE) * total]
    level = record.header["config"]["escape_loss"]
    below = [line["step"] for line in lines if level is not None and line["loss"] < level]
    return {
        "effective_lr_early": _rate(early),
        "effective_lr_late": _rate(late),
        "effective_lr_min": min((line["effective_lr"] for line in lines), default=None),
        **{f"{name}_early": _mean(early, name) for name in NOISES},
        **{f"{name}_late": _mean(late, name) for name in NOISES},
        "full_loss": lines[-1]["loss"] if lines else None,
        "escape_step": below[0] if below else None,
    }


def curves_of(record: RunRecord) -> dict[str, list[float]]:
    """What was measured over the steps of a run, for plots: every so many lines of it, four digits each."""
    lines = _measured(record)
    chosen = lines[:: math.ceil(len(lines) / MOST_POINTS)] if lines else []
    return {name: [float(f"{line[name]:.4g}") for line in chosen] for name in ("step", *CURVES)} if chosen else {}


def _measured(record: RunRecord) -> list[dict[str, float]]:
    """The lines with finite numbers; effective_lr in units of the learning rate."""
    found = []
    for line in record.statistics:
        moves = line["dynamics"]
        if not line["valid"] or moves is None or not moves["lr"] or None in (moves["effective_lr"], moves["full_loss"]):
            continue
        found.append(
            {
                "step": line["step"],
                "effective_lr": moves["effective_lr"] / moves["lr"],
                "loss": moves["full_loss"],
                "grad_squared": moves["grad_squared"],
                **{name: moves[name] for name in NOISES},
            }
        )
    return found


def _mean(lines: Sequence[dict[str, float]], name: str) -> float | None:
    return sum(line[name] for line in lines) / len(lines) if lines else None


def _rate(lines: Sequence[dict[str, float]]) -> float | None:
    """Numerator and denominator are averaged first and divided last: where g is small a single ratio says nothing."""
    squares = sum(line["grad_squared"] for line in lines)
    return sum(line["effective_lr"] * line["grad_squared"] for line in lines) / squares if squares > 0 else None


def outcome_of(result: dict[str, Any]) -> Outcome:
    """A line of the results, for claims."""
    metrics, diverged = result["metrics"], result["diverged"]
    counted = {name: value if not diverged or counts_diverged(name) else None for name, value in metrics.items()}
    return Outcome(metrics=counted, diverged=diverged)
