"""Statistics and flatness of a run: the samples that they use, and the lines that they add to the record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ddpcore.data import Dataset
from ddpcore.diagnostics import Flatness, HessianStatistics, NoiseStatistics, flatness
from ddpcore.options.typed import check_range
from ddpcore.training.sections import RunConfig, random_samples
from ddpcore.training.trainer import BATCH_SIZE, Trainer, by_place


class Measurements:
    """What the config asks to measure along a run, of a trainer before its first step. ValueError as below."""

    def __init__(self, run: RunConfig, trainer: Trainer) -> None:
        self.noise, self.hessian = noise_statistics(run, trainer), hessian_statistics(run, trainer)
        self._num_seen = {"statistics": 0, "hessian": 0}

    def new_rows(self) -> list[dict[str, Any]]:
        """The entries of the run's record since the last call, without the values of single parameters."""
        rows: list[dict[str, Any]] = []
        for kind, source in (("statistics", self.noise), ("hessian", self.hessian)):
            records = [] if source is None else source.records[self._num_seen[kind] :]
            self._num_seen[kind] += len(records)
            for record in records:
                names = [item.name for item in fields(record) if item.name != "segments"]
                rows.append({"kind": kind, **{item: getattr(record, item) for item in names}})
        return rows

    def state_dict(self) -> dict[str, Any] | None:
        """What later records depend on: the state of the noise statistics, None without them."""
        return None if self.noise is None else self.noise.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None, step: int) -> None:
        """Restore :meth:`state_dict` in a run that goes on after ``step``."""
        if self.noise is not None and state is not None:
            self.noise.load_state_dict(state)
        if self.hessian is not None:
            self.hessian.num_steps = step


def noise_statistics(run: RunConfig, trainer: Trainer) -> NoiseStatistics | None:
    """The noise statistics of a trainer before its first step; None if ``statistics_every`` is 0.

    The full loss is the mean training loss of the training set, or of a fixed part of it, with label smoothing and
    augmentation as in training. Samples that cannot be divided equally among the n learners are left out. The loss is
    computed in parts of the size of a backward pass, so that it needs no more memory than a training step.

    ValueError: the training set is smaller than ``statistics_samples``, or has fewer samples than learners.
    """
    if not run.statistics_every:
        return None
    n, total = trainer.batches.num_learners, len(trainer.dataset.train)
    parts_of_all = _fixed_parts(trainer, "statistics_samples", run.statistics_samples, run.seed)
    num = n * sum(part.shape[1] for part in parts_of_all)
    size = trainer.batches.batch_size // n
    is_all = run.statistics_samples in (None, total)
    kind = "the training set" if is_all else f"a part of the training set, {num} samples"
    return NoiseStatistics(
        trainer.handle,
        trainer.optimizer,
        run.statistics_every,
        batch_size=size,
        loss=lambda: _loss_of(trainer, trainer.parts()),
        full_loss=lambda: _loss_of(trainer, parts_of_all),
        full_loss_of=kind,
        per_segment=False,
        full_batch=None if trainer.batches.drop_last else lambda: trainer.indices().shape[1] == size,
        population=total,
        max_grad_norm=trainer.max_grad_norm,
    )


def hessian_statistics(run: RunConfig, trainer: Trainer) -> HessianStatistics | None:
    """The Hessian along a run, of a trainer before its first step; None if ``hessian_every`` is 0.

    The loss is the one of :func:`noise_statistics`, on ``hessian_samples`` samples. ValueError: the training set is
    smaller than these, or has fewer samples than learners; or the model has fewer parameters than ``hessian_top``.
    """
    if not run.hessian_every:
        return None
    num_parameters = sum(one.numel() for one in trainer.module.parameters() if one.requires_grad)
    check_range("hessian_top", run.hessian_top, most=num_parameters - 1)
    parts = _fixed_parts(trainer, "hessian_samples", run.hessian_samples, run.seed)
    return HessianStatistics(
        trainer.handle,
        lambda: _loss_of(trainer, parts),
        optimizer=trainer.optimizer,
        every=run.hessian_every,
        top=run.hessian_top,
        seed=run.seed,
    )


def _fixed_parts(trainer: Trainer, name: str, num: int | None, seed: int) -> Sequence[Tensor]:
    """``num`` random training samples (None: all), divided equally among the n learners, ``[L, M]`` a part."""
    n = trainer.batches.num_learners
    num = len(trainer.dataset.train) if num is None else num
    chosen = random_samples(trainer.dataset, name, num, n, seed)
    indices_LM = chosen[: num - num % n].view(n, -1)[trainer.learners]  # M samples per learner
    return indices_LM.split(-(-trainer.batches.batch_size // (n * trainer.accumulation)), dim=1)


def _loss_of(trainer: Trainer, parts: Sequence[Tensor]) -> Iterator[Tensor]:
    num = sum(part.shape[1] for part in parts)
    for part in parts:
        yield trainer.losses(trainer.handle.model, part).sum() * (part.shape[1] / num)


def flatness_of(model: nn.Module, dataset: Dataset, *, num_samples: int, seed: int) -> Flatness:
    """The flatness of a trained model, switched to evaluation mode, on ``num_samples`` random training samples.

    The loss is the cross-entropy without label smoothing. ValueError: the training set is smaller.
    """
    indices = random_samples(dataset, "flatness_samples", num_samples, 1, seed)
    num_labels = len(indices) * dataset.train.labels[0].numel()
    model.eval()

    def parts() -> Iterator[Tensor]:
        for part in indices.split(BATCH_SIZE):
            inputs, labels = dataset.train.batch(part)
            logits, labels = by_place(model(inputs).float(), labels)
            yield F.cross_entropy(logits, labels, reduction="sum") / num_labels

    return flatness(model, parts, seed=seed)
