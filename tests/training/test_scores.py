"""Scores of small examples, compared with their definitions and with torchmetrics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ddpcore.training import trainer as metrics


def one_hot(choices: list[int], num_classes: int) -> torch.Tensor:
    return torch.eye(num_classes)[choices]


def test_confusion_matrix_by_hand() -> None:
    labels, choices = [0, 0, 0, 1, 1, 2], [0, 1, 0, 1, 1, 0]
    expected = [[2, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0]]
    matrix = metrics.confusion_matrix(one_hot(choices, 3), torch.tensor(labels))
    assert matrix.dtype == torch.int64
    assert matrix.tolist() == expected
    parts = [metrics.confusion_matrix(one_hot(choices[i:j], 3), torch.tensor(labels[i:j])) for i, j in [(0, 2), (2, 6)]]
    assert torch.equal(parts[0] + parts[1], matrix)
    diverged = torch.tensor([[math.nan, 9.0], [0.0, 1.0]])
    assert metrics.confusion_matrix(diverged, torch.tensor([1, 1])).tolist() == [[0, 0, 0], [0, 1, 1]]


def test_scores_by_hand() -> None:
    """TP, FP, FN, TN of class 0: 2, 1, 1, 2; of class 1: 2, 1, 0, 3; of class 2: 0, 0, 1, 5: its precision is 0/0."""
    found = metrics.scores(torch.tensor([[2, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0]]))
    assert found.accuracy == pytest.approx(4 / 6)
    assert found.precision == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)
    assert found.recall == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert found.f1 == pytest.approx((4 / 6 + 4 / 5 + 0) / 3)
    assert found.specificity == pytest.approx((2 / 3 + 3 / 4 + 1) / 3)


def test_scores_leave_out_classes_that_do_not_occur_and_count_no_choice_as_wrong() -> None:
    absent = metrics.scores(torch.tensor([[1, 1, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0]]))
    present = metrics.scores(torch.tensor([[1, 1, 0], [0, 2, 0]]))
    assert absent == present
    undecided = metrics.scores(torch.tensor([[1, 0, 1], [0, 2, 0]]))
    assert (undecided.accuracy, undecided.precision, undecided.recall) == (0.75, 1.0, 0.75)
    assert metrics.scores(torch.tensor([[0, 0, 3], [0, 0, 1]])) == metrics.Scores(
        accuracy=0.0, precision=0.0, recall=0.0, f1=0.0, specificity=1.0
    )
    perfect = metrics.scores(torch.tensor([[3, 0, 0], [0, 1, 0]]))
    assert perfect == metrics.Scores(accuracy=1.0, precision=1.0, recall=1.0, f1=1.0, specificity=1.0)


def test_scores_of_random_choices_equal_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(5, (200,), generator=generator)
    choices = torch.randint(5, (200,), generator=generator)
    found = metrics.scores(metrics.confusion_matrix(torch.eye(5)[choices], labels))
    by_class = []
    for c in range(5):
        tp, fp, fn, tn = (
            int((((labels == c) == is_label) & ((choices == c) == is_choice)).sum())
            for is_label, is_choice in [(True, True), (False, True), (True, False), (False, False)]
        )
        by_class.append((tp / (tp + fp), tp / (tp + fn), 2 * tp / (2 * tp + fp + fn), tn / (tn + fp)))
    expected = np.mean(by_class, axis=0)
    assert [found.precision, found.recall, found.f1, found.specificity] == pytest.approx(expected.tolist())
    assert found.accuracy == pytest.approx((choices == labels).double().mean().item())


@pytest.mark.parametrize("num_choices", [1, 2, 5, 7])
@pytest.mark.parametrize("num_labels", [1, 3, 7])
def test_scores_are_those_of_torchmetrics(num_labels: int, num_choices: int) -> None:
    """Also if some of the seven classes are never a label, never a prediction, or neither."""
    torchmetrics = pytest.importorskip("torchmetrics.functional.classification", reason="torchmetrics is not installed")
    generator = torch.Generator().manual_seed(10 * num_labels + num_choices)
    labels, choices = (torch.randint(num, (60,), generator=generator) for num in (num_labels, num_choices))
    found = metrics.scores(metrics.confusion_matrix(torch.eye(7)[choices], labels))
    assert found.accuracy == pytest.approx(torchmetrics.multiclass_accuracy(choices, labels, 7, average="micro").item())
    for name, function in {
        "precision": torchmetrics.multiclass_precision,
        "recall": torchmetrics.multiclass_recall,
        "f1": torchmetrics.multiclass_f1_score,
        "specificity": torchmetrics.multiclass_specificity,
    }.items():
        assert getattr(found, name) == pytest.approx(function(choices, labels, 7, average="macro").item()), name


def test_scores_refuse_what_is_no_confusion_matrix() -> None:
    for wrong in (torch.ones(3, 3), torch.ones(4), torch.zeros(2, 3)):
        with pytest.raises(ValueError, match=r"must be \[C, C \+ 1\] and count"):
            metrics.scores(wrong)
    with pytest.raises(ValueError, match="confusion_matrix"):
        metrics.confusion_matrix(torch.zeros(4, 2), torch.zeros(3, dtype=torch.int64))
    for label in (2, -1):
        with pytest.raises(ValueError, match=r"outside 0\.\.1"):
            metrics.confusion_matrix(torch.zeros(1, 2), torch.tensor([label]))
