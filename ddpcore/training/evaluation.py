"""Evaluation of a model on a split. Shapes: C classes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcore.comm.base import Communicator
from ddpcore.data import Split
from ddpcore.training.scores import Scores, by_place, confusion_matrix, scores

BATCH_SIZE = 1000


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result over all samples of a split.

    Attributes:
        loss: mean cross-entropy of all labels, without label smoothing.
        confusion: counts ``[C, C + 1]``, see :func:`ddpcore.training.scores.confusion_matrix`.
    """

    loss: float
    confusion: Tensor

    @property
    def scores(self) -> Scores:
        """Accuracy, and the macro means of precision, recall, F1 and specificity."""
        return scores(self.confusion)

    @property
    def error_pct(self) -> float:
        """Percentage of wrong predictions."""
        total = int(self.confusion.sum())
        return 100.0 * (total - int(self.confusion.diagonal().sum())) / total

    def to_dict(self) -> dict[str, float]:
        """Loss and scores, for a record."""
        return {"loss": self.loss, **asdict(self.scores)}


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, num_classes: int, comm: Communicator) -> Evaluation:
    """Evaluate a model on a split; each rank takes a part of the samples. Collective.

    Args:
        model: in evaluation mode, the same on every rank.
        split: on the device of the model.
        num_classes: C.
        comm: the learners that take part.
    """
    while True:
        num, sums = comm.num_learners, _sums(model, split, num_classes, comm)
        if comm.num_learners == num:
            break  # else a rank has died with its part of the samples
    loss_L, confusion_L = sums
    return Evaluation(loss=loss_L.sum().item() / split.labels.numel(), confusion=confusion_L.sum(dim=0).cpu())


def _sums(model: nn.Module, split: Split, num_classes: int, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Sum of the losses, and confusion matrix, of each learner's part. Collective."""
    device, num_rows = split.labels.device, len(comm.learners)
    samples = torch.arange(len(split), device=device).tensor_split(max(1, comm.num_learners // num_rows))
    mine = samples[comm.learners[0] // num_rows]
    # gather takes one row per learner: the first row holds the sums of this process, and the others stay zero.
    loss = torch.zeros(num_rows, dtype=torch.float64, device=device)
    confusion = torch.zeros(num_rows, num_classes, num_classes + 1, dtype=torch.int64, device=device)
    for chunk in mine.split(BATCH_SIZE) if len(mine) else ():
        inputs, labels = split.batch(chunk)
        logits, labels = by_place(model(inputs).float(), labels)
        loss[0] += F.cross_entropy(logits, labels, reduction="sum")
        confusion[0] += confusion_matrix(logits, labels)
    return comm.gather(loss), comm.gather(confusion)
