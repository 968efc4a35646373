"""What diagnostics say of a run: the samples that they take, and their lines of the record.

Shapes: L learners held by this process, n learners in all, M samples a learner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcore.data import Dataset
from ddpcore.data.shards import permutation
from ddpcore.diagnostics import Flatness, NoiseRecord, NoiseStatistics, flatness
from ddpcore.training.evaluation import BATCH_SIZE
from ddpcore.training.trainer import Trainer

_KEY = (0, 0, 0, 3)  # of the permutation: one that no other draw uses


def attach(trainer: Trainer, *, every: int, num_samples: int | None, seed: int) -> None:
    """Watch a trainer that has not begun. Its weights keep their bits.

    The full loss is the mean training loss, labels smoothed and images augmented as in training, of the training set or
    of a part of it that stays the same; the remainder that n learners cannot share equally is left out. It is computed
    in pieces of a learner's mini-batch, so that it takes no more memory than a step.

    Args:
        trainer: of several learners.
        every: steps from one record to the next.
        num_samples: of the training set; None takes all.
        seed: decides which.

    Raises:
        ValueError: there are not so many samples.
    """
    n, total = trainer.batches.num_learners, len(trainer.dataset.train)
    num = total if num_samples is None else num_samples
    chosen = part_of(trainer.dataset, "statistics_samples", num, n, seed)
    indices_LM = chosen[: num - num % n].view(n, -1)[trainer.learners]
    size = trainer.batches.batch_size // n
    model = trainer.handle.model

    def sum_of(parts: Sequence[Tensor]) -> Iterator[Tensor]:
        num = sum(part.shape[1] for part in parts)
        for part in parts:
            yield trainer.losses(model, part).sum() * (part.shape[1] / num)

    kind = "the training set" if num == total else f"a part of the training set, {indices_LM.shape[1] * n} samples"
    trainer.statistics = NoiseStatistics(
        trainer.handle,
        trainer.optimizer,
        every,
        batch_size=size,
        loss=lambda: sum_of(trainer.parts()),
        full_loss=lambda: sum_of(indices_LM.split(-(-size // trainer.accumulation), dim=1)),
        full_loss_of=kind,
        per_segment=False,
        full_batch=None if trainer.batches.drop_last else lambda: trainer.indices().shape[1] == size,
        population=total,
        max_grad_norm=trainer.max_grad_norm,
    )


def flatness_of(model: nn.Module, dataset: Dataset, *, num_samples: int, seed: int) -> Flatness:
    """The measures of a trained model, on a part of the training set that the seed decides.

    The loss is the cross-entropy, labels not smoothed, of the model in evaluation mode.

    Raises:
        ValueError: there are not so many samples.
    """
    indices = part_of(dataset, "flatness_samples", num_samples, 1, seed)
    model.eval()

    def parts() -> Iterator[Tensor]:
        for part in indices.split(BATCH_SIZE):
            inputs, labels = dataset.train.batch(part)
            yield F.cross_entropy(model(inputs).float(), labels, reduction="sum") / len(indices)

    return flatness(model, parts, seed=seed)


def part_of(dataset: Dataset, name: str, num: int, least: int, seed: int) -> Tensor:
    """So many random training samples; ValueError, which names the field, where there are not so many."""
    total = len(dataset.train)
    if not least <= num <= total:
        raise ValueError(f"{name} is {num}: take {least} to {total}, the training set")
    return torch.from_numpy(permutation(total, seed, *_KEY)[:num].copy())


def row_of(record: NoiseRecord) -> dict[str, Any]:
    """A line of the run's record."""
    values = {item.name: getattr(record, item.name) for item in fields(record) if item.name != "segments"}
    return {"kind": "statistics", **values}
