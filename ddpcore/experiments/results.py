"""The numbers of one run that studies are compared by."""

from __future__ import annotations

import math
from typing import Any

from ddpcore.engine import RunRecord
from ddpcore.experiments.claims import Outcome

METRICS = {
    "train_loss": "mean loss of the last epoch's training steps",
    "test_loss": "mean cross-entropy on the test split",
    "accuracy": "share of the test split, 0 to 1",
    "accuracy_pct": "the same in percent",
    "accuracy_or_chance_pct": "accuracy_pct, or 100 / classes of a run that diverged, as some tables print it",
    "loss_or_chance": "test_loss, or ln(classes) of a run that diverged, as some tables print it",
    "best_accuracy_pct": "of the evaluations, in percent",
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
}
"""What a row may be compared by. Of a run that chose on the validation split, scores are those of the test split."""


def metrics_of(record: RunRecord, recoveries: int = 0) -> dict[str, float | None]:
    """Every metric of a finished run; None is what it has not."""
    last: dict[str, Any] = record.epochs[-1] if record.epochs else {}
    on_test = last if last.get("split") == "test" else record.final.get("test") or {}
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
        "accuracy_or_chance_pct": 100 / classes if classes else accuracy_pct,
        "loss_or_chance": math.log(classes) if classes else on_test.get("loss"),
        "best_accuracy_pct": None if best is None else 100 * best,
        **{name: on_test.get(name) for name in ("precision", "recall", "f1", "specificity")},
        "seconds": seconds,
        "seconds_to_target": None if target is None or best is None or best < target else seconds,
        "steps": record.final["step"],
        "parameters_mb": 4 * record.header["num_parameters"] / 2**20,
        "consensus_distance": last.get("consensus_distance"),
        "recoveries": recoveries,
    }


def outcome_of(result: dict[str, Any]) -> Outcome:
    """A line of the results, for claims."""
    return Outcome(metrics=result["metrics"], diverged=result["diverged"])
