"""One training step, the evaluation of a model over all ranks, and its scores."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import KW_ONLY, asdict, dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcore.comm.base import Communicator
from ddpcore.data import Dataset, ResharedBatches, ShardedBatches, Split
from ddpcore.distributed.handle import Distributed
from ddpcore.distributed.saved import load_run_state, load_state, state_of
from ddpcore.optim.schedules import Schedule

BATCH_SIZE = 1000  # samples of an evaluation at a time


def by_place(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[N, C, T]`` and labels ``[N, T]`` of T places as ``[N T, C]`` and ``[N T]``; others as they are."""
    if logits.ndim != 3 or labels.shape != (logits.shape[0], logits.shape[2]):
        return logits, labels
    return logits.transpose(1, 2).flatten(0, 1), labels.flatten()


def confusion_matrix(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Count samples by label and prediction. The matrices of parts of a data set add up to the matrix of the whole set.

    Args:
        logits: ``[N, C]``; the prediction is the class of the largest logit.
        labels: int64 ``[N]``.

    Returns int64 ``[C, C + 1]``: row = label, column = prediction. The last column counts samples whose logits contain
    a NaN, which predict no class. ValueError: the shapes do not fit, N is 0, or a label is outside 0..C-1.
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
    have the same number of samples. ValueError: the matrix is not ``[C, C + 1]``, or all counts are 0.
    """
    if confusion.ndim != 2 or confusion.shape[1] != confusion.shape[0] + 1 or int(confusion.sum()) < 1:
        raise ValueError(f"scores: a matrix of {list(confusion.shape)} must be [C, C + 1] and count a sample at least")
    counts = confusion.double().cpu()
    total, right_C = counts.sum(), counts.diagonal()
    false_positive_C = counts.sum(0)[:-1] - right_C
    false_negative_C = counts.sum(1) - right_C
    true_negative_C = total - right_C - false_positive_C - false_negative_C
    occurs_C = right_C + false_positive_C + false_negative_C > 0

    def mean_ratio(part_C: Tensor, rest_C: Tensor) -> float:
        return float((part_C / (part_C + rest_C)).nan_to_num(0.0)[occurs_C].mean())

    return Scores(
        accuracy=float(right_C.sum() / total),
        precision=mean_ratio(right_C, false_positive_C),
        recall=mean_ratio(right_C, false_negative_C),
        f1=mean_ratio(2 * right_C, false_positive_C + false_negative_C),
        specificity=mean_ratio(true_negative_C, false_positive_C),
    )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result over all samples of a split: ``loss``, the mean cross-entropy of all labels, without label smoothing.

    ``confusion`` are counts ``[C, C + 1]``, see :func:`ddpcore.training.trainer.confusion_matrix`.
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
    """Evaluate a model on a split of C classes; each rank takes a part of the samples. Collective.

    The model is in evaluation mode and the same on every rank, and the split is on its device.
    """
    device, num_learners = split.labels.device, -1
    while num_learners != comm.num_learners:  # again after a rank has died with its part of the samples
        num_learners, num_rows = comm.num_learners, len(comm.learners)
        samples = torch.arange(len(split), device=device).tensor_split(max(1, num_learners // num_rows))
        mine, first = samples[comm.learners[0] // num_rows], comm.rows_read[0]
        # gather takes one row per learner: the first one holds the sums of this process, and the others stay zero.
        loss = torch.zeros(num_rows, dtype=torch.float64, device=device)
        confusion = torch.zeros(num_rows, num_classes, num_classes + 1, dtype=torch.int64, device=device)
        for chunk in mine.split(BATCH_SIZE) if len(mine) else ():
            inputs, labels = split.batch(chunk)
            logits, labels = by_place(model(inputs).float(), labels)
            loss[first] += F.cross_entropy(logits, labels, reduction="sum")
            confusion[first] += confusion_matrix(logits, labels)
        loss_L, confusion_L = comm.gather(loss), comm.gather(confusion)
    return Evaluation(loss=loss_L.sum().item() / split.labels.numel(), confusion=confusion_L.sum(dim=0).cpu())


@dataclass(eq=False, repr=False)
class Trainer:
    """Trains one model on the mini-batches of the learners of this process.

    Attributes:
        handle, optimizer: the result and an argument of ``ddpcore.distribute``.
        dataset: the data set, on the device of the model.
        batches: which samples each learner takes at a step.
        learners: the rows of ``batches`` for this process: one for a real rank, all for virtual learners.
        at_once: how many virtual learners' activations live at once, see :meth:`ddpcore.Distributed.split`.
        stacked: True if the model takes ``[L, B, ...]`` (virtual learners), False if it takes ``[B, ...]``.
        module: the model that was passed to ``distribute``; :meth:`state_dict` holds its state.
        schedule: learning rate of each step; None keeps the optimizer's.
        accumulation: backward passes per step.
        label_smoothing: of the training loss.
        max_grad_norm: largest norm of a learner's gradient; only for optimizers that do not clip in their step.
        autocast: dtype of forward passes; None is the dtype of the weights.
        compile: run the model through ``torch.compile``.
        shares_L: the sizes of the learners' batches, relative to the mean of all.
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
    at_once: int | None = None

    def __post_init__(self) -> None:
        self.model = torch.compile(self.handle.model) if self.compile else self.handle.model
        self.num_steps, sizes = 0, self.batches.sizes
        shares = [sizes[one] / fmean(sizes) if sizes else 1.0 for one in self.learners]
        self.shares_L = torch.tensor(shares, dtype=torch.float64, device=self.dataset.train.labels.device)

    def step(self) -> Tensor:
        """Train on the next global batch; return the loss ``[L]`` of each learner without waiting for the device."""
        if self.schedule is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.schedule(self.num_steps)
        self.optimizer.zero_grad()
        parts = self.parts()
        num = sum(part.shape[1] for part in parts)
        if self.handle.counts_samples:
            sizes = self.batches.sizes
            self.handle.num_samples = [sizes[one] if sizes else num for one in self.learners]
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
        """The training samples of the next step, int64 ``[L, B]``; rows of smaller batches end with -1."""
        if isinstance(dealt := self._dealt(), ResharedBatches):
            return torch.stack([dealt.indices(self.num_steps, learner) for learner in self.learners])
        rows, sizes = self.batches.indices(self.num_steps)[self.learners], self.batches.sizes
        return rows[:, : sizes[self.learners[0]]] if sizes and not self.stacked else rows

    def parts(self) -> tuple[Tensor, ...]:
        """:meth:`indices` divided among the backward passes of the step."""
        return self.indices().chunk(self.accumulation, dim=1)

    def losses(self, model: Callable[..., Tensor], indices_LB: Tensor) -> Tensor:
        """Mean training loss ``[L]`` of each learner's samples, computed with ``model``."""
        return self._losses(model, *self._batch(indices_LB))

    def _backward_of_each(self, indices_LB: Tensor) -> Iterator[Tensor]:
        """Passes of learners with batches of different size, which no tensor holds: each model alone; their losses."""
        train, epoch = self.dataset.train, self.batches.epoch(self.num_steps)
        for model, row in zip(self.handle.models, indices_LB, strict=True):
            losses = self._losses(model, *train.batch(row[row >= 0], epoch))
            losses.sum().backward()
            yield losses.detach()

    def _batch(self, indices_LB: Tensor) -> tuple[Tensor, Tensor]:
        indices = indices_LB if self.stacked else indices_LB[0]
        return self.dataset.train.batch(indices, self._dealt().epoch(self.num_steps))

    def _dealt(self) -> ShardedBatches | ResharedBatches:
        """The batches, as the learners that are left share them."""
        return ResharedBatches(self.batches, self.handle.deals) if self.handle.deals else self.batches

    def _losses(self, model: Callable[..., Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        stacked = self.stacked and model not in self.handle.models
        with torch.autocast(inputs.device.type, self.autocast) if self.autocast else nullcontext():
            logits = model(inputs)
        return learner_losses(logits.float(), labels, self.label_smoothing, stacked=stacked)

    def _backward(self, indices_LB: Tensor, share: float) -> Tensor:
        """Forward and backward pass of a part of the batch; return ``share`` times the losses ``[L]``."""
        found = []
        try:
            if self.stacked and self.batches.sizes:
                return torch.cat(list(self._backward_of_each(indices_LB)))
            for inputs, labels in self.handle.split(*self._batch(indices_LB), at_once=self.at_once):
                losses = self._losses(self.model, inputs, labels)
                if share != 1:
                    losses = losses * share
                losses.sum().backward()
                found.append(losses.detach())
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            first = " ".join(str(error).partition("\n")[0].split())
            advice = "set strategy.learners_at_once=1, which gives the same bits, or a larger data.accumulation"
            raise MemoryError(f"{first} (forward or backward pass): {advice}") from None
        return found[0] if len(found) == 1 else torch.cat(found)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on: the step, module, optimizer, handle, torch's random generators."""
        return {"step": self.num_steps, **state_of(self.handle, self.module, self.optimizer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of :meth:`state_dict`. Collective. ValueError: it is of another model or version of ddpcore."""
        self.handle.check_state(state["handle"])
        mine, theirs = self.module.state_dict(), state["model"]
        for name in [*mine, *theirs]:
            here, there = (tuple(side[name].shape) if name in side else None for side in (mine, theirs))
            if here != there:
                what = f"the checkpoint is of another model: {name} is {there} there and {here} here"
                raise ValueError(f"{what}: build the model of the checkpoint")
        if isinstance(self.handle.model, nn.parallel.DistributedDataParallel):
            # DDP rebuilds its buckets once, after its first backward pass, and then adds the gradients of the ranks in
            # another order. One backward pass now, whose result is dropped, makes a resumed run give the same bits.
            self._backward(self.indices(), 1.0)
            self.optimizer.zero_grad()
        load_state(self.handle, self.module, self.optimizer, state)
        self.num_steps = state["step"]

    def load_moved(self, states: list[dict[str, Any]], moments: str) -> None:
        """Load results of :meth:`state_dict`, of all processes of a run with another number of learners. Collective.

        For ``moments`` and a ValueError see :func:`ddpcore.distributed.saved.load_run_state`.
        """
        if self.handle.learner is None:  # a baseline, whose learners are equal
            random, states = self.state_dict()["random"], states[:1]
            self.load_state_dict({**states[0], "random": random})
        else:
            load_run_state(self.handle, states, moments=moments)
        self.num_steps = states[0]["step"]
        torch.manual_seed(torch.initial_seed() + self.num_steps)  # no learner repeats the numbers of the first steps

    @torch.no_grad()
    def evaluation_model(self, batch_norm: str = "average", recalibration_batches: int = 0) -> nn.Module:
        """The :meth:`~ddpcore.Distributed.evaluation_model` in evaluation mode, the same on every rank. Collective.

        ``recalibrate`` uses so many of the last training batches.
        """
        inputs = self._last_inputs(recalibration_batches) if batch_norm == "recalibrate" else None
        model = self.handle.evaluation_model(batch_norm, inputs).eval()
        if batch_norm == "local":  # the buffers of learner 0, so that all ranks evaluate the same model
            for buffer in model.buffers():
                rows = buffer.reshape(1, -1).repeat(len(self.handle.comm.learners), 1)
                self.handle.comm.broadcast_(rows)
                buffer.copy_(rows[0].view_as(buffer))
        return model

    def evaluate(self, model: nn.Module, split: str = "test") -> Evaluation | None:
        """Evaluate a result of :meth:`evaluation_model` on a split; None if there is no such split. Collective."""
        samples = self.dataset.splits().get(split)
        return None if samples is None else evaluate(model, samples, self.dataset.num_classes, self.handle.comm)

    def _last_inputs(self, num_batches: int) -> Iterator[Tensor]:
        dealt = self._dealt()
        for step in range(max(0, self.num_steps - num_batches), self.num_steps):
            if isinstance(dealt, ResharedBatches):
                there = dealt.members(step)  # one that joined later takes samples of another, so that it has some
                rows = [dealt.indices(step, one if one in there else there[one % len(there)]) for one in self.learners]
                indices = torch.cat(rows)
            else:
                indices = dealt.indices(step)[self.learners].flatten()
            yield self.dataset.train.batch(indices[indices >= 0], dealt.epoch(step))[0]


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
    return F.cross_entropy(*flat, reduction="none", label_smoothing=label_smoothing).view(len(labels), -1).mean(dim=1)
