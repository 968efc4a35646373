"""The training loop on one page."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpcore.data import Dataset, ShardedBatches
from ddpcore.distributed import Distributed
from ddpcore.metrics import error_pct


class Trainer:
    """Trains one model on the mini-batches of the learners that this process holds.

    Args:
        handle: what ``ddpcore.distribute`` returned.
        optimizer: the one that was given to it.
        dataset: on the device of the model.
        batches: which samples each learner takes at a step.
        learners: rows of ``batches`` that this process trains on: one number for a real rank, all for virtual learners.
        stacked: the model takes ``[L, B, ...]`` (virtual learners) and not ``[B, ...]``.
    """

    def __init__(
        self,
        handle: Distributed,
        optimizer: torch.optim.Optimizer,
        dataset: Dataset,
        batches: ShardedBatches,
        *,
        learners: list[int],
        stacked: bool,
    ) -> None:
        self.handle = handle
        self.optimizer = optimizer
        self.dataset = dataset
        self.batches = batches
        self.learners = learners
        self.stacked = stacked
        self.num_steps = 0

    def step(self) -> Tensor:
        """Train on the next global batch; returns the losses ``[L]`` of the learners held here, without a sync."""
        indices = self.batches.indices(self.num_steps)[self.learners]
        inputs, labels = self.dataset.train.batch(indices if self.stacked else indices[0])
        self.optimizer.zero_grad()
        losses = learner_losses(self.handle.model(inputs), labels)
        losses.sum().backward()
        self.optimizer.step()
        self.num_steps += 1
        return losses.detach()

    @torch.no_grad()
    def test_error_pct(self, batch_size: int = 2000) -> float | None:
        """Percentage of the whole test set that the averaged model gets wrong; None without a test set.

        Every rank must call this. Test data are never used in training.
        """
        model = self.handle.evaluation_model().eval()
        if self.dataset.test is None:
            return None
        labels = self.dataset.test.labels
        chunks = torch.arange(len(labels), device=labels.device).split(batch_size)
        return error_pct(torch.cat([model(self.dataset.test.batch(chunk)[0]) for chunk in chunks]), labels)


def learner_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of each learner's mini-batch: ``[L]`` from logits ``[L, B, C]``, ``[1]`` from ``[B, C]``."""
    if logits.dim() == 2:
        return F.cross_entropy(logits, labels)[None]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).mean(dim=1)
