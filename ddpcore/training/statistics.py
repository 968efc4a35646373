"""Statistics and flatness of a run: the samples that they use, and the lines that they add to the record."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ddpcore.data import Dataset
from ddpcore.diagnostics import Flatness, HessianStatistics, NoiseStatistics, flatness
from ddpcore.options.typed import check_range
from ddpcore.training.sections import RunConfig, random_samples
from ddpcore.training.trainer import BATCH_SIZE, Trainer, by_place


class Measurements:
    """What the config asks to measure along a run, of a trainer before its first step. No bit of the training changes.

    The full loss of noise and Hessian is the mean training loss of the training set, or of a fixed part of it, with
    label smoothing and augmentation as in training. Samples that cannot be divided equally among the n learners are
    left out. It is computed in parts of the size of a backward pass, so that it needs no more memory than a step.

    ValueError: the training set has fewer samples than ``statistics_samples``, ``hessian_samples`` or learners, or the
    model fewer parameters than ``hessian_top`` eigenvectors.
    """

    def __init__(self, run: RunConfig, trainer: Trainer) -> None:
        self.noise: NoiseStatistics | None = None
        self.hessian: HessianStatistics | None = None
        self._num_seen = {"statistics": 0, "hessian": 0}
        batches, total = trainer.batches, len(trainer.dataset.train)
        if run.statistics_every:
            all_parts = _fixed_parts(trainer, "statistics_samples", run.statistics_samples, run.seed)
            num = batches.num_learners * sum(part.shape[1] for part in all_parts)
            size = batches.batch_size // batches.num_learners
            is_all = run.statistics_samples in (None, total)
            self.noise = NoiseStatistics(
                trainer.handle,
                trainer.optimizer,
                run.statistics_every,
                batch_size=size,
                loss=lambda: _loss_of(trainer, trainer.parts()),
                full_loss=lambda: _loss_of(trainer, all_parts),
                hessian=run.statistics_hessian,
                full_loss_of="the training set" if is_all else f"a part of the training set, {num} samples",
                per_segment=False,
                full_batch=None if batches.drop_last else lambda: trainer.indices().shape[1] == size,
                population=total,
                max_grad_norm=trainer.max_grad_norm,
            )
        if run.hessian_every:
            num_parameters = sum(one.numel() for one in trainer.module.parameters() if one.requires_grad)
            check_range("hessian_top", run.hessian_top, most=num_parameters - 1)
            parts = _fixed_parts(trainer, "hessian_samples", run.hessian_samples, run.seed)
            self.hessian = HessianStatistics(
                trainer.handle,
                lambda: _loss_of(trainer, parts),
                optimizer=trainer.optimizer,
                every=run.hessian_every,
                top=run.hessian_top,
                seed=run.seed,
            )

    def new_rows(self) -> list[dict[str, Any]]:
        """The entries of the run's record since the last call, without the values of single parameters."""
        rows: list[dict[str, Any]] = []
        for kind, source in (("statistics", self.noise), ("hessian", self.hessian)):
            records = [] if source is None else source.records[self._num_seen[kind] :]
            self._num_seen[kind] += len(records)
            rows += [{"kind": kind} | {k: v for k, v in vars(one).items() if k != "segments"} for one in records]
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
