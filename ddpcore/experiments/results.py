"""The numbers of one run that studies are compared by."""

from __future__ import annotations

from typing import Any

from ddpcore.engine import RunRecord
from ddpcore.experiments.claims import Outcome

METRICS = {
    "train_loss": "mean loss of the last epoch's training steps",
    "test_loss": "mean cross-entropy on the test split",
    "accuracy": "share of the test split, 0 to 1",
    "accuracy_pct": "the same in percent",
    "best_accuracy_pct": "of the evaluations, in percent",
    "precision": "macro mean over classes, 0 to 1",
    "recall": "macro mean over classes, 0 to 1",
    "f1": "macro mean over classes, 0 to 1",
    "specificity": "macro mean over classes, 0 to 1",
    "seconds": "of training, without evaluation and checkpoints",
    "consensus_distance": "of the learners at the end",
    "recoveries": "times that a rank died and the run went on from its checkpoint",
}
"""What a row may be compared by. Of a run that chose on the validation split, scores are those of the test split."""


def metrics_of(record: RunRecord, recoveries: int = 0) -> dict[str, float | None]:
    """Every metric of a finished run; None is what it has not."""
    last: dict[str, Any] = record.epochs[-1] if record.epochs else {}
    on_test = last if last.get("split") == "test" else record.final.get("test") or {}
    best = record.final.get("best_accuracy")
    accuracy = on_test.get("accuracy")
    return {
        "train_loss": last.get("train_loss"),
        "test_loss": on_test.get("loss"),
        "accuracy": accuracy,
        "accuracy_pct": None if accuracy is None else 100 * accuracy,
        "best_accuracy_pct": None if best is None else 100 * best,
        **{name: on_test.get(name) for name in ("precision", "recall", "f1", "specificity")},
        "seconds": sum(epoch["seconds"] for epoch in record.epochs),
        "consensus_distance": last.get("consensus_distance"),
        "recoveries": recoveries,
    }


def outcome_of(result: dict[str, Any]) -> Outcome:
    """A line of the results, for claims."""
    return Outcome(metrics=result["metrics"], diverged=result["diverged"])
