"""The training step: batches, loss, gradients, clipping, update; evaluation of the averaged model.

Shapes: L learners of this process, B samples of a learner's mini-batch, C classes, S of one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcore.comm.base import Communicator
from ddpcore.data import Dataset, ResharedBatches, ShardedBatches
from ddpcore.distributed.handle import Distributed
from ddpcore.optim.schedules import Schedule
from ddpcore.training.evaluation import Evaluation, evaluate
from ddpcore.training.scores import by_place


@dataclass(eq=False, repr=False)
class Trainer:
    """Trains one model on the mini-batches of the learners of this process.

    Attributes:
        handle: the result of ``ddpcore.distribute``.
        optimizer: the optimizer that was passed to ``distribute``.
        dataset: the data set, on the device of the model.
        batches: which samples each learner takes at a step.
        learners: the rows of ``batches`` for this process: one for a real rank, all for virtual learners.
        stacked: True if the model takes ``[L, B, ...]`` (virtual learners), False if it takes ``[B, ...]``.
        module: the model that was passed to ``distribute``; :meth:`state_dict` holds its state.
        schedule: learning rate of each step; None keeps the optimizer's.
        accumulation: backward passes per step.
        label_smoothing: label smoothing of the training loss.
        max_grad_norm: largest norm of a learner's gradient; only for optimizers that do not clip in their step.
        autocast: dtype of forward passes; None is the dtype of the weights.
        compile: run the model through ``torch.compile``.
    """

    handle: Distributed
    optimizer: torch.optim.Optimizer
    dataset: Dataset
    batches: ShardedBatches
    _: KW_ONLY
    learners: list[int]
    stacked: bool
    module: nn.Module
    schedule: Schedule | None = None
    accumulation: int = 1
    label_smoothing: float = 0.0
    max_grad_norm: float | None = None
    autocast: torch.dtype | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        self.model = torch.compile(self.handle.model) if self.compile else self.handle.model
        self.num_steps = 0

    def step(self) -> Tensor:
        """Train on the next global batch; return the loss ``[L]`` of each learner without waiting for the device."""
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
            self.handle.clip_grad_norm_(self.max_grad_norm)
        self.optimizer.step()
        self.num_steps += 1
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum(dim=0)

    def indices(self) -> Tensor:
        """The training samples of the next step, int64 ``[L, B]``."""
        deals = self.handle.deals
        if not deals:
            return self.batches.indices(self.num_steps)[self.learners]
        shared = ResharedBatches(self.batches, deals)
        return torch.stack([shared.indices(self.num_steps, learner) for learner in self.learners])

    def parts(self) -> tuple[Tensor, ...]:
        """:meth:`indices` divided among the backward passes of the step."""
        return self.indices().chunk(self.accumulation, dim=1)

    def losses(self, model: Callable[..., Tensor], indices_LB: Tensor) -> Tensor:
        """Mean training loss ``[L]`` of each learner's samples, computed with ``model``."""
        deals = self.handle.deals
        epoch = (ResharedBatches(self.batches, deals) if deals else self.batches).epoch(self.num_steps)
        inputs, labels = self.dataset.train.batch(indices_LB if self.stacked else indices_LB[0], epoch)
        with torch.autocast(inputs.device.type, self.autocast) if self.autocast else nullcontext():
            logits = model(inputs)
        return learner_losses(logits.float(), labels, self.label_smoothing, stacked=self.stacked)

    def _backward(self, indices_LB: Tensor, share: float) -> Tensor:
        """Forward and backward pass of a part of the batch; return ``share`` times the losses ``[L]``."""
        losses = self.losses(self.model, indices_LB)
        if share != 1:
            losses = losses * share
        losses.sum().backward()
        return losses.detach()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on: the step, module, optimizer, handle, torch's random generators."""
        device, random = self.dataset.train.labels.device, {"cpu": torch.get_rng_state()}
        if device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(device)
        return {
            "step": self.num_steps,
            "model": dict(self.module.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "handle": self.handle.state_dict(),
            "random": random,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict`. Collective.

        Raises:
            ValueError: the state belongs to another model or another version of ddpcore.
        """
        self.handle.check_state(state["handle"])
        mine, theirs = self.module.state_dict(), state["model"]
        for name in [*mine, *theirs]:
            here, there = (tuple(side[name].shape) if name in side else None for side in (mine, theirs))
            if here != there:
                raise ValueError(
                    f"the checkpoint is of another model: {name} is {there} there and {here} here: "
                    "build the model of the checkpoint"
                )
        if isinstance(self.handle.model, nn.parallel.DistributedDataParallel):
            # DDP rebuilds its buckets once, after its first backward pass, and then adds the gradients of the ranks in
            # another order. One backward pass now, whose result is dropped, makes a resumed run give the same bits.
            self._backward(self.indices(), 1.0)
            self.optimizer.zero_grad()
        self.module.load_state_dict(theirs)
        self.optimizer.load_state_dict(state["optimizer"])
        self.handle.load_state_dict(state["handle"])
        self.num_steps, device = state["step"], self.dataset.train.labels.device
        torch.set_rng_state(state["random"]["cpu"])
        if "cuda" in state["random"] and device.type == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"].cpu(), device)

    @torch.no_grad()
    def evaluation_model(self, batch_norm: str = "average", recalibration_batches: int = 0) -> nn.Module:
        """The averaged model in evaluation mode, the same on every rank. Collective.

        Args:
            batch_norm: see :meth:`ddpcore.Distributed.evaluation_model`.
            recalibration_batches: how many of the last training batches ``recalibrate`` uses.
        """
        inputs = self._last_inputs(recalibration_batches) if batch_norm == "recalibrate" else None
        model = self.handle.evaluation_model(batch_norm, inputs).eval()
        if batch_norm == "local":
            _take_first_buffers(model, self.handle.comm)
        return model

    def evaluate(self, model: nn.Module, split: str = "test") -> Evaluation | None:
        """Evaluate a result of :meth:`evaluation_model` on a whole split; None if the data set has no such split.

        The ranks divide the samples among them. Training is not affected. Collective.
        """
        samples = self.dataset.splits().get(split)
        return None if samples is None else evaluate(model, samples, self.dataset.num_classes, self.handle.comm)

    def _last_inputs(self, num_batches: int) -> Iterator[Tensor]:
        for step in range(max(0, self.num_steps - num_batches), self.num_steps):
            indices = self.batches.indices(step)[self.learners].flatten()
            yield self.dataset.train.batch(indices, self.batches.epoch(step))[0]


@torch.no_grad()
def _take_first_buffers(model: nn.Module, comm: Communicator) -> None:
    """Copy the buffers of learner 0 to every rank, so that all ranks evaluate the same model."""
    for buffer in model.buffers():
        rows = buffer.reshape(1, -1).repeat(len(comm.learners), 1)
        comm.broadcast_(rows)
        buffer.copy_(rows[0].view_as(buffer))


def learner_losses(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, *, stacked: bool) -> Tensor:
    """Mean cross-entropy of each learner's mini-batch, ``[L]``.

    Args:
        logits: ``[L, B, C]`` if stacked, else ``[B, C]`` of one learner; with labels at T places ``[L, B, C, T]`` or
            ``[B, C, T]``.
        labels: ``[L, B]`` or ``[B]``; at T places ``[L, B, T]`` or ``[B, T]``.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        stacked: whether there is a dimension of learners.
    """
    if not stacked:
        return F.cross_entropy(*by_place(logits, labels), label_smoothing=label_smoothing)[None]
    flat = by_place(logits.flatten(0, 1), labels.flatten(0, 1))
    losses = F.cross_entropy(*flat, reduction="none", label_smoothing=label_smoothing)
    return losses.view(len(labels), -1).mean(dim=1)
