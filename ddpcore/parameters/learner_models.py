"""One model for many virtual learners: every parameter is a stack with one row per learner."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

TRIALS = 3  # measurements of each way to run the learners, for vectorize="measure"


class StackedModel(nn.Module):
    """Runs each learner's row of the parameters on its own batch: ``[L, B, ...] -> [L, B, ...]``.

    Args:
        model: its parameters that need a gradient are stacks ``[L, *S]``, as ``FlatParameters`` makes them. Its buffers
            become stacks too: each learner has its own.
        num_learners: L. A parameter that one learner uses counts as used by all: the others have zero gradients.
        vectorize: True runs all learners in one ``torch.func.vmap``. False runs one after the other, with the bits of a
            real learner. None chooses vmap if the model has no buffers, convolutions, dropout or recurrence, so the
            same model always runs in the same way. ``"measure"`` times both on the first batch and keeps the faster.
    """

    def __init__(self, model: nn.Module, num_learners: int, vectorize: bool | str | None = None) -> None:
        super().__init__()
        if isinstance(vectorize, str) and vectorize != "measure":
            raise ValueError(f"unknown vectorize {vectorize!r}: choose from True, False, None, 'measure'")
        self.module = model
        self.num_learners = num_learners
        self._stacks = {name for name, p in model.named_parameters() if p.requires_grad}  # also if frozen later
        # Gradients of stacked parameters have other strides than torch expects, which is no error.
        warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")
        self.vectorize = _vectorizes_well(model) if vectorize is None else vectorize
        for owner in model.modules():
            for name, buffer in list(owner.named_buffers(recurse=False)):
                setattr(owner, name, buffer.expand(num_learners, *buffer.shape).clone())

    def forward(self, inputs: Tensor) -> Tensor:
        """Learner j gets only ``inputs[j]``."""
        if inputs.shape[0] != self.num_learners:
            raise ValueError(
                f"inputs have {inputs.shape[0]} rows for {self.num_learners} learners: "
                "pass [learners, batch, ...], one mini-batch per learner"
            )
        parameters: dict[str, Tensor] = {n: p for n, p in self.module.named_parameters() if n in self._stacks}
        buffers = dict(self.module.named_buffers())
        if self.vectorize == "measure":
            self.vectorize = self._is_faster_vectorized(parameters, buffers, inputs)
        run = self._together if self.vectorize else self._in_turn
        return run(parameters, buffers, inputs)

    def _together(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
        run = vmap(lambda p, b, x: functional_call(self.module, (p, b), (x,)), randomness="different")
        return run(parameters, buffers, inputs)

    def _in_turn(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
        # unbind makes one gradient of the whole stack. Indexing would add L gradients of its size.
        rows = {name: p.unbind(0) for name, p in parameters.items()}
        return torch.stack(
            [
                functional_call(
                    self.module,
                    ({name: row[j] for name, row in rows.items()}, {name: b[j] for name, b in buffers.items()}),
                    (inputs[j],),
                )
                for j in range(self.num_learners)
            ]
        )

    def _is_faster_vectorized(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> bool:
        """Time both ways on copies; random numbers and buffers do not change."""
        copies = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
        seconds: dict[bool, list[float]] = {True: [], False: []}
        devices = [inputs.device] if inputs.is_cuda else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            for _ in range(1 + TRIALS):  # the first is a warm-up
                for together, run in ((True, self._together), (False, self._in_turn)):
                    start = time.perf_counter()
                    try:
                        outputs = run(copies, {name: b.clone() for name, b in buffers.items()}, inputs)
                        torch.autograd.grad(outputs.float().sum(), list(copies.values()), allow_unused=True)
                    except RuntimeError:
                        if not together:
                            raise
                        return False  # vmap cannot run every model
                    if inputs.is_cuda:
                        torch.cuda.synchronize()
                    seconds[together].append(time.perf_counter() - start)
        return min(seconds[True][1:]) < min(seconds[False][1:])


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy of a model that may keep activations, which torch cannot copy: they are copied without their graph.

    An activation of a finished vmap cannot be read, and becomes an empty tensor.
    """
    memo: dict[int, Any] = {}  # objects that deepcopy regards as copied
    for module in model.modules():
        for tensor in _tensors_in(vars(module)):
            if torch._C._functorch.is_batchedtensor(tensor):
                memo[id(tensor)] = torch.empty(0)
            elif not isinstance(tensor, nn.Parameter):  # .data, because the graph of a changed view cannot be used
                memo[id(tensor)] = tensor.data.clone()
    return copy.deepcopy(model, memo)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def single_model(stacked: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """A copy of a stacked model for one learner, with ``values`` by name. Other buffers are those of learner 0."""
    model = copy_of(stacked)
    for name, parameter in model.named_parameters():
        if name in values:
            parameter.grad = None
            parameter.data = values[name]
    for prefix, owner in model.named_modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            full = f"{prefix}.{name}" if prefix else name
            setattr(owner, name, values[full] if full in values else buffer[0].clone())
    return model


def _vectorizes_well(model: nn.Module) -> bool:
    convolutions = (nn.modules.conv._ConvNd, nn.modules.dropout._DropoutNd, nn.RNNBase)
    return next(model.buffers(), None) is None and not any(isinstance(m, convolutions) for m in model.modules())
