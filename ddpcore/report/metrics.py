"""The metrics of studies: their names, what they mean, and when a run has a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpcore.report.claims import Outcome

METRICS = {
    "train_loss": "mean loss of the last epoch's training steps",
    "test_loss": "mean cross-entropy on the test split",
    "accuracy": "share of the test split, 0 to 1",
    "accuracy_pct": "accuracy in percent",
    "error_pct": "share of the test split that the model gets wrong, in percent",
    "accuracy_or_chance_pct": "accuracy_pct; of a run that diverged 100 / classes, as some tables print it",
    "loss_or_chance": "test_loss; of a run that diverged ln(classes), as some tables print it",
    "best_accuracy_pct": "the best accuracy of all evaluations, in percent",
    "validation_accuracy_pct": "share of the validation split at the end, in percent; of runs that are evaluated on it",
    "precision": "macro mean over classes, 0 to 1",
    "recall": "macro mean over classes, 0 to 1",
    "f1": "macro mean over classes, 0 to 1",
    "specificity": "macro mean over classes, 0 to 1",
    "seconds": "time of training without evaluation and checkpoints; over an emulated link its emulated time",
    "seconds_to_target": "seconds, of a run that reached its target accuracy; other runs have none",
    "steps": "steps of the optimizer",
    "parameters_mb": "trained parameters in fp32, in units of 2^20 bytes",
    "total_variation": "total variation distance of the learners' classes from those of all",
    "consensus_distance": "consensus distance of the learners at the end",
    "recoveries": "how often a rank died and the run resumed from its checkpoint",
    "effective_lr_early": "a_e / a of the measured steps in the first fifth of the run, sum of g_a.g over sum of |g|^2",
    "effective_lr_late": "the same of the last fifth",
    "effective_lr_min": "the smallest a_e / a of the measured steps",
    "noise_early": "noise strength D, mean over the measured steps of the first fifth of the run",
    "noise_late": "the same of the last fifth",
    "landscape_noise_early": "the part D2 of the noise that the learners' distance adds, in the first fifth",
    "landscape_noise_late": "the same of the last fifth",
    "landscape_upright_early": "the part of D2 orthogonal to g, which is a part of D, in the first fifth",
    "landscape_upright_late": "the same of the last fifth",
    "noise_scale": "gradient noise scale B in samples, of the last record",
    "full_loss": "training loss of the mean weights, at the last measured step",
    "escape_step": "the first measured step with full loss below escape_loss",
    "sharpness_late": "the largest eigenvalue of the Hessian along the run, mean over the last fifth",
    "sharpness_max": "its largest measured value",
    "disagreement_top_late": "share of the learners' disagreement along the top eigenvectors, mean over the last fifth",
    "noise_top_late": "share of the gradient noise along the top eigenvectors, mean over the last fifth",
    "hessian_eigenvalue": "the largest eigenvalue of the Hessian of the training loss at the averaged weights",
    "relative_eigenvalue": "the same of diag|w| H diag|w|: for changes of each weight relative to its size",
    "relative_trace": "the trace of diag|w| H diag|w|",
    "loss_increase": "mean increase of the training loss when each weight w becomes w (1 + 0.1 x), x standard normal",
}
"""Numbers of a run; docs/noise_statistics.md explains the symbols.

Scores are those of the test split, also if the run was evaluated on the validation split.
"""


def counts_diverged(metric: str) -> bool:
    """Whether the metric defines a value for a run that diverged, which may then be averaged."""
    return "or_chance" in metric


def outcome_of(result: Mapping[str, Any]) -> Outcome:
    """A line of the results, for claims. Metrics of a run that diverged count only where they are defined for it."""
    metrics, diverged = result["metrics"], result["diverged"]
    counted = {name: value if not diverged or counts_diverged(name) else None for name, value in metrics.items()}
    return Outcome(metrics=counted, diverged=diverged)
