"""The training loop on one page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcore.comm.base import Communicator
from ddpcore.data import Dataset, ShardedBatches
from ddpcore.diagnostics import NoiseStatistics
from ddpcore.distributed.hooks import Distributed
from ddpcore.optim.schedules import Schedule
from ddpcore.training.evaluation import Evaluation, evaluate


class Trainer:
    """Trains one model on the mini-batches of the learners that this process holds.

    Args:
        handle: what ``ddpcore.distribute`` returned.
        optimizer: the one that was given to it.
        dataset: on the device of the model.
        batches: which samples each learner takes at a step.
        learners: rows of ``batches`` that this process trains on: one number for a real rank, all for virtual learners.
        stacked: the model takes ``[L, B, ...]`` (virtual learners) and not ``[B, ...]``.
        schedule: learning rate of each step; None leaves the optimizer's.
        accumulation: backward passes a step.
        label_smoothing: of the loss in training.
        max_grad_norm: largest norm of a learner's gradient, for optimizers that do not clip themselves.
        autocast: dtype of forward passes; None is that of the weights.
        compile: run the model through ``torch.compile``.
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
        schedule: Schedule | None = None,
        accumulation: int = 1,
        label_smoothing: float = 0.0,
        max_grad_norm: float | None = None,
        autocast: torch.dtype | None = None,
        compile: bool = False,
    ) -> None:
        self.handle = handle
        self.optimizer = optimizer
        self.statistics: NoiseStatistics | None = None  # set by ddpcore.training.statistics.attach
        self.dataset = dataset
        self.batches = batches
        self.learners = learners
        self.stacked = stacked
        self.schedule = schedule
        self.accumulation = accumulation
        self.label_smoothing = label_smoothing
        self.max_grad_norm = max_grad_norm
        self.autocast = autocast
        self.model = torch.compile(handle.model) if compile else handle.model
        self.num_steps = 0

    def step(self) -> Tensor:
        """Train on the next global batch; returns the losses ``[L]`` of the learners held here, without a sync."""
        if self.schedule is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.schedule(self.num_steps)
        self.optimizer.zero_grad()
        parts = self.parts()
        num = sum(part.shape[1] for part in parts)
        losses = []
        for part in parts:
            with self.handle.no_sync() if part is not parts[-1] else nullcontext():
                losses.append(self._backward(part, part.shape[1] / num))
        if self.max_grad_norm is not None:
            clip_gradients_(self.optimizer, self.max_grad_norm, self.stacked)
        self.optimizer.step()
        self.num_steps += 1
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(dim=0)

    def indices(self) -> Tensor:
        """Training samples int64 ``[L, B]`` of the step at hand."""
        return self.batches.indices(self.num_steps)[self.learners]

    def parts(self) -> tuple[Tensor, ...]:
        """The same cut into what each backward pass takes."""
        return self.indices().chunk(self.accumulation, dim=1)

    def losses(self, model: Callable[..., Tensor], indices_LB: Tensor) -> Tensor:
        """Mean training loss ``[L]`` of each learner's samples, by the model as it stands."""
        epoch = self.batches.epoch(self.num_steps)
        inputs, labels = self.dataset.train.batch(indices_LB if self.stacked else indices_LB[0], epoch)
        with torch.autocast(inputs.device.type, self.autocast) if self.autocast else nullcontext():
            logits = model(inputs)
        return learner_losses(logits.float(), labels, self.label_smoothing)

    def rehearse(self) -> None:
        """Before a state is loaded: a backward pass for nothing, after which DDP lays out its buckets anew.

        It does so once, after its first backward pass, and from then on adds up ranks' gradients in another order: a
        run that goes on must start with the second layout to come to the same bits.
        """
        if isinstance(self.handle.model, nn.parallel.DistributedDataParallel):
            self._backward(self.indices(), 1.0)
            self.optimizer.zero_grad()

    def _backward(self, indices_LB: Tensor, share: float) -> Tensor:
        """Forward and backward of a part of the batch; its share of the losses ``[L]``."""
        losses = self.losses(self.model, indices_LB)
        if share != 1:
            losses = losses * share
        losses.sum().backward()
        return losses.detach()

    @torch.no_grad()
    def evaluation_model(self, batch_norm: str = "average", recalibration_batches: int = 0) -> nn.Module:
        """The averaged model in evaluation mode, the same on every rank; each must call this.

        Args:
            batch_norm: see :meth:`ddpcore.Distributed.evaluation_model`.
            recalibration_batches: for ``recalibrate``: the last so many training batches.
        """
        inputs = self._last_inputs(recalibration_batches) if batch_norm == "recalibrate" else None
        model = self.handle.evaluation_model(batch_norm, inputs).eval()
        if batch_norm == "local":
            _take_first_buffers(model, self.handle.comm)
        return model

    def evaluate(self, model: nn.Module, split: str = "test") -> Evaluation | None:
        """What :meth:`evaluation_model` gave on a whole split, ``test`` or ``validation``; None where there is none.

        Every rank must call this, and each takes a part of the samples. Nothing of it enters training.
        """
        samples = self.dataset.splits().get(split)
        return None if samples is None else evaluate(model, samples, self.dataset.num_classes, self.handle.comm)

    def _last_inputs(self, num_batches: int) -> Iterator[Tensor]:
        for step in range(max(0, self.num_steps - num_batches), self.num_steps):
            indices = self.batches.indices(step)[self.learners].flatten()
            yield self.dataset.train.batch(indices, self.batches.epoch(step))[0]


@torch.no_grad()
def _take_first_buffers(model: nn.Module, comm: Communicator) -> None:
    """Local buffers are those of learner 0 on every rank: all ranks score parts of one split by one model."""
    for buffer in model.buffers():
        rows = buffer.reshape(1, -1).repeat(len(comm.learners), 1)
        comm.broadcast_(rows)
        buffer.copy_(rows[0].view_as(buffer))


def learner_losses(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of each learner's mini-batch: ``[L]`` from logits ``[L, B, C]``, ``[1]`` from ``[B, C]``."""
    if logits.dim() == 2:
        return F.cross_entropy(logits, labels, label_smoothing=label_smoothing)[None]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=label_smoothing)
    return losses.view(labels.shape).mean(dim=1)


@torch.no_grad()
def clip_gradients_(optimizer: torch.optim.Optimizer, max_norm: float, stacked: bool) -> None:
    """Scale each learner's gradient to ``max_norm`` where it is longer; of stacks ``[L, *S]`` each row is a learner.

    As ``torch.nn.utils.clip_grad_norm_`` (Pascanu et al. 2013), which would take all learners for one.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for learner in zip(*(gradient.unbind(0) for gradient in gradients), strict=True) if stacked else [gradients]:
        norm = torch.nn.utils.get_total_norm(learner)
        torch._foreach_mul_(list(learner), (max_norm / (norm + 1e-6)).clamp(max=1.0))
