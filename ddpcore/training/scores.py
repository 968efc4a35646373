"""Classification scores: the confusion matrix, and the scores computed from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def by_place(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[N, C, T]`` and labels ``[N, T]`` of T places as ``[N T, C]`` and ``[N T]``; others as they are."""
    if logits.ndim != 3 or labels.shape != (logits.shape[0], logits.shape[2]):
        return logits, labels
    return logits.transpose(1, 2).flatten(0, 1), labels.flatten()


def confusion_matrix(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Count samples by label and prediction.

    The matrices of parts of a data set add up to the matrix of the whole data set.

    Args:
        logits: ``[N, C]``; the prediction is the class of the largest logit.
        labels: int64 ``[N]``.

    Returns:
        int64 ``[C, C + 1]``: row = label, column = prediction. The last column counts samples whose logits contain a
        NaN, which predict no class.

    Raises:
        ValueError: the shapes do not fit, N is 0, or a label is outside 0..C-1.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or len(labels) == 0:
        shapes = f"logits {list(logits.shape)} and labels {list(labels.shape)}"
        raise ValueError(f"confusion_matrix: {shapes} must be [N, C] and [N], N at least 1")
    num_classes = logits.shape[1]
    if int(labels.min()) < 0 or int(labels.max()) >= num_classes:
        raise ValueError(f"confusion_matrix: a label is outside 0..{num_classes - 1}, the classes of the logits")
    choices = torch.where(logits.isnan().any(dim=1), num_classes, logits.argmax(dim=1))
    cells = (labels * (num_classes + 1) + choices).bincount(minlength=num_classes * (num_classes + 1))
    return cells.view(num_classes, num_classes + 1)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of a classifier, each from 0 to 1. All except accuracy are means over classes (macro averages)."""

    accuracy: float
    precision: float
    recall: float
    f1: float
    specificity: float


def scores(confusion: torch.Tensor) -> Scores:
    """The scores of a confusion matrix.

    With TP, FP, FN and TN of one class against all others: precision TP / (TP + FP), recall TP / (TP + FN), F1
    2 TP / (2 TP + FP + FN), specificity TN / (TN + FP), averaged over the classes that occur as a label or a
    prediction. 0 / 0 counts as 0. So F1 is the mean of the F1 of the classes, and recall equals accuracy if all classes
    have the same number of samples.

    Raises:
        ValueError: the matrix is not ``[C, C + 1]``, or all counts are 0.
    """
    if confusion.ndim != 2 or confusion.shape[1] != confusion.shape[0] + 1 or int(confusion.sum()) < 1:
        raise ValueError(f"scores: a matrix of {list(confusion.shape)} must be [C, C + 1] and count a sample at least")
    counts = confusion.double().cpu()
    total, right_C = counts.sum(), counts.diagonal()
    false_positive_C = counts.sum(0)[:-1] - right_C
    false_negative_C = counts.sum(1) - right_C
    true_negative_C = total - right_C - false_positive_C - false_negative_C
    occurs_C = right_C + false_positive_C + false_negative_C > 0

    def mean_ratio(part_C: torch.Tensor, rest_C: torch.Tensor) -> float:
        return float((part_C / (part_C + rest_C)).nan_to_num(0.0)[occurs_C].mean())

    return Scores(
        accuracy=float(right_C.sum() / total),
        precision=mean_ratio(right_C, false_positive_C),
        recall=mean_ratio(right_C, false_negative_C),
        f1=mean_ratio(2 * right_C, false_positive_C + false_negative_C),
        specificity=mean_ratio(true_negative_C, false_positive_C),
    )
