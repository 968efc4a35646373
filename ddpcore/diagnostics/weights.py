"""The parameters of a model as one vector [P], and losses over a data set."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddpcore.comm.groups import Call, meet, size_of
from ddpcore.diagnostics.passes import Loss, as_it_was, at_even, parts_of, trained
from ddpcore.parameters.learner_models import LearnerModels
from ddpcore.parameters.shards import is_dtensor

LossFunction = Callable[[Any, Any], Tensor]
"""``loss_fn(outputs, targets)`` returns the mean loss of a batch."""


class WeightVector:
    """The parameters of a model that need a gradient, in the order of ``model.parameters()``.

    ``values_P`` is a copy of them when this object was made, ``[P]``, in a dtype that holds all of theirs. ValueError:
    no parameter needs a gradient, one is complex or a DTensor, or they are on several devices.
    """

    def __init__(self, model: nn.Module) -> None:
        if any(map(is_dtensor, trained(model))):
            raise ValueError("parameters are DTensors, such as shards: load their full state dict into a whole model")
        self.parameters = trained(model)
        if len(devices := {str(parameter.device) for parameter in self.parameters}) > 1:
            raise ValueError(f"the parameters are on {' and '.join(sorted(devices))}: move the model to one device")
        self.model = model
        self.values_P = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])

    @property
    def numel(self) -> int:
        """P."""
        return len(self.values_P)

    def views(self, rows: Tensor) -> list[Tensor]:
        """One view ``[..., *S]`` per parameter of shape S, of ``[..., P]``."""
        parts = rows.split([parameter.numel() for parameter in self.parameters], dim=-1)
        return [part.view((*rows.shape[:-1], *one.shape)) for part, one in zip(parts, self.parameters, strict=True)]

    @contextmanager
    def at(self, weights_P: Tensor) -> Iterator[None]:
        """Inside, the parameters hold other weights. Their own memory does not change."""
        own = [parameter.data for parameter in self.parameters]
        try:
            torch.clear_autocast_cache()  # it holds the weights of before, cast
            for parameter, view in zip(self.parameters, self.views(weights_P), strict=True):
                parameter.data = at_even(view).to(parameter.dtype)  # a copy, where the dtypes are not the same
            yield
        finally:
            for parameter, data in zip(self.parameters, own, strict=True):
                parameter.data = data
            torch.clear_autocast_cache()

    def loss_at(self, weights_P: Tensor, loss: Loss) -> float:
        """The loss with these weights. Buffers and random generators are restored."""
        with self.at(weights_P), as_it_was(self.model, weights_P.device), torch.enable_grad():
            return sum(part.item() for part in parts_of(loss))


class DataLoss:
    """The mean loss of a model over a data set, as a ``loss`` for :class:`Hessian`, ``flatness`` and ``landscape``.

    Each batch has the weight of its samples, so a smaller last batch does not bias the mean.

    Args:
        model: called with the inputs of a batch.
        loss_fn: returns the mean loss of a batch from outputs and targets, as ``torch.nn.functional.cross_entropy``.
        batches: pairs (inputs, targets) on the model's device. It is read again for each evaluation, so it must hold
            the same samples each time: a list, or a ``DataLoader`` without random augmentation, and for ``out=`` of
            ``landscape`` without ``shuffle``. Inputs are a tensor, a tuple of arguments, or a dict as one argument.
        group: the process group of ranks that hold different samples. The parts of a rank's loss are then divided by
            the number of samples of all ranks: the sum over ranks is the mean over all samples.

    ValueError: there is no batch, or the model is ``handle.model`` of virtual learners.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batches: Iterable[tuple[Any, Any]],
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if isinstance(model, LearnerModels):
            raise ValueError("rows of handle.model are no samples: pass handle.evaluation_model() or handle.models[0]")
        self.model, self.loss_fn, self.batches, self.group = model, loss_fn, batches, group
        self._device = device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        with as_it_was(model, device):  # a DataLoader draws a number, and a data set may, too
            self._own = sum(_checked(inputs, targets) for inputs, targets in batches)
        self.total = int(sum_over(group, torch.tensor([self._own], device=device))[0])
        if not self.total:
            raise ValueError("batches holds no sample: pass a list of pairs, or a loader that can be reread")

    def digest(self) -> str:
        """A hash of all samples, and of the buffers and frozen parameters of the model, which tells data apart."""
        found = hashlib.sha256()
        with as_it_was(self.model, self._device):
            samples = tree_leaves([list(pair) for pair in self.batches])
        frozen = (parameter for parameter in self.model.parameters() if not parameter.requires_grad)
        for tensor in (*self.model.buffers(), *frozen, *samples):
            if isinstance(tensor, Tensor):
                found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
                found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()[:16]

    @staticmethod
    def num_samples(inputs: Any) -> int:
        """The number of samples of a batch: the length of its first tensor, also in a dict."""
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, Tensor) and leaf.dim():
                return len(leaf)
        raise ValueError("the inputs of a batch hold no tensor of samples: pass pairs (inputs, targets) of tensors")

    def outputs(self, inputs: Any) -> Any:
        """The outputs of the model for the inputs of a batch, a tensor or a tuple of arguments."""
        return self.model(*inputs) if isinstance(inputs, tuple | list) else self.model(inputs)

    def weighted(self) -> Iterator[tuple[float, Any, Any]]:
        """Each batch with its share of all samples: (share, inputs, targets)."""
        seen = 0
        for inputs, targets in self.batches:
            num = self.num_samples(inputs)
            seen += num
            yield num / self.total, inputs, targets
        if seen != self._own:
            raise ValueError(f"batches held {self._own} samples, and now {seen}: pass a list, or the same loader again")

    def __call__(self) -> Iterator[Tensor]:
        """The parts of the loss, one per batch."""
        for share, inputs, targets in self.weighted():
            yield self.loss_fn(self.outputs(inputs), targets) * share


def _checked(inputs: Any, targets: Any) -> int:
    """The samples of a batch. ValueError: targets have another number, as where time comes before the samples."""
    num, rows = DataLoss.num_samples(inputs), len(targets) if isinstance(targets, Tensor) and targets.dim() else 1
    shapes = [leaf.shape[1:] for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    # Each sample may have several rows of targets, such as its tokens or pixels: the first or last dimensions.
    each = {math.prod(part) for shape in shapes for i in range(len(shape) + 1) for part in (shape[:i], shape[i:])}
    if rows > 1 and rows not in {num * one for one in each}:
        sizes = f"the inputs of a batch have {num} rows and its targets {rows}"
        raise ValueError(f"{sizes}: pass inputs [samples, ...], also where a model takes [time, samples, ...]")
    return num


def sum_over(group: dist.ProcessGroup | None, values: Tensor) -> Tensor:
    """The sum over the ranks of a group, in place; None is one process. One all-reduce."""
    if group is not None:
        with Call(group, what := f"a sum of {size_of(values)} over ranks"):
            meet(group, what)
            dist.all_reduce(values, group=group)
    return values
