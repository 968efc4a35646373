"""Noise statistics and flatness of a run: the samples that they use, and the lines that they add to the record."""

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
from ddpcore.training.config import TrainConfig
from ddpcore.training.evaluation import BATCH_SIZE
from ddpcore.training.trainer import Trainer

_KEY = (0, 0, 0, 3)  # key of the permutation of the samples; no other random draw uses this key


def noise_statistics(config: TrainConfig, trainer: Trainer) -> NoiseStatistics | None:
    """The noise statistics of a trainer before its first step; None if ``statistics_every`` is 0.

    The statistics do not change the weights by a single bit. The full loss is the mean training loss of the training
    set, or of a fixed part of it. It uses label smoothing and augmentation as in training. Samples that cannot be
    divided equally among the n learners are left out. The loss is computed in parts. Each part has the size of a
    backward pass of training, so that the full loss needs no more memory than a training step.

    Raises:
        ValueError: the training set is smaller than ``statistics_samples``, or has fewer samples than learners.
    """
    if not config.statistics_every:
        return None
    n, total = trainer.batches.num_learners, len(trainer.dataset.train)
    num = total if config.statistics_samples is None else config.statistics_samples
    chosen = random_samples(trainer.dataset, "statistics_samples", num, n, config.seed)
    indices_LM = chosen[: num - num % n].view(n, -1)[trainer.learners]  # M samples per learner
    size = trainer.batches.batch_size // n
    model = trainer.handle.model

    def loss_of(parts: Sequence[Tensor]) -> Iterator[Tensor]:
        num = sum(part.shape[1] for part in parts)
        for part in parts:
            yield trainer.losses(model, part).sum() * (part.shape[1] / num)

    kind = "the training set" if num == total else f"a part of the training set, {indices_LM.shape[1] * n} samples"
    return NoiseStatistics(
        trainer.handle,
        trainer.optimizer,
        config.statistics_every,
        batch_size=size,
        loss=lambda: loss_of(trainer.parts()),
        full_loss=lambda: loss_of(indices_LM.split(-(-size // trainer.accumulation), dim=1)),
        full_loss_of=kind,
        per_segment=False,
        full_batch=None if trainer.batches.drop_last else lambda: trainer.indices().shape[1] == size,
        population=total,
        max_grad_norm=trainer.max_grad_norm,
    )


def flatness_of(model: nn.Module, dataset: Dataset, *, num_samples: int, seed: int) -> Flatness:
    """The flatness of a trained model on ``num_samples`` random training samples.

    The loss is the cross-entropy without label smoothing. The model is switched to evaluation mode.

    Raises:
        ValueError: the training set is smaller than ``num_samples``.
    """
    indices = random_samples(dataset, "flatness_samples", num_samples, 1, seed)
    model.eval()

    def parts() -> Iterator[Tensor]:
        for part in indices.split(BATCH_SIZE):
            inputs, labels = dataset.train.batch(part)
            yield F.cross_entropy(model(inputs).float(), labels, reduction="sum") / len(indices)

    return flatness(model, parts, seed=seed)


def check_samples(config: TrainConfig, dataset: Dataset) -> None:
    """Raise ValueError if the training set is too small for ``statistics_samples`` or ``flatness_samples``."""
    if config.statistics_every and config.statistics_samples is not None:
        random_samples(dataset, "statistics_samples", config.statistics_samples, config.learners, config.seed)
    if config.flatness_samples:
        random_samples(dataset, "flatness_samples", config.flatness_samples, 1, config.seed)


def random_samples(dataset: Dataset, name: str, num: int, least: int, seed: int) -> Tensor:
    """The sample numbers of ``num`` random training samples, int64 ``[num]``, on the CPU.

    Raises:
        ValueError: ``num`` is below ``least`` or above the size of the training set; the message has ``name``.
    """
    total = len(dataset.train)
    if not least <= num <= total:
        raise ValueError(f"{name} is {num}: take {least} to {total}, the size of the training set")
    return torch.from_numpy(permutation(total, seed, *_KEY)[:num].copy())


def row_of(record: NoiseRecord) -> dict[str, Any]:
    """The entry of one measurement in the run's record, without its segments."""
    values = {item.name: getattr(record, item.name) for item in fields(record) if item.name != "segments"}
    return {"kind": "statistics", **values}
