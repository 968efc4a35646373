"""One model for many virtual learners: every parameter a stack, one row a learner."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

TRIALS = 3  # of each way, where the faster one is to be found


class StackedModel(nn.Module):
    """Runs each learner's row of the parameters on its own batch: ``[L, B, ...] -> [L, B, ...]``.

    Args:
        model: its parameters that need a gradient are stacks ``[L, *S]``, as ``FlatParameters`` leaves them. Its
            buffers become stacks too, each learner with its own.
        num_learners: L. A parameter that takes part for one learner takes part for all: the others see zero gradients.
        vectorize: True runs all learners in one ``torch.func.vmap``, False one after the other with the arithmetic of a
            real learner bit for bit. None takes vmap where the model has no buffers, convolutions or randomness, so the
            same model runs alike each time. ``"measure"`` times both on the first batch and takes the faster.
    """

    def __init__(self, model: nn.Module, num_learners: int, vectorize: bool | str | None = None) -> None:
        super().__init__()
        if isinstance(vectorize, str) and vectorize != "measure":
            raise ValueError(f"unknown vectorize {vectorize!r}: choose from True, False, None, 'measure'")
        self.module = model
        self.num_learners = num_learners
        self._stacks = {name for name, p in model.named_parameters() if p.requires_grad}  # also if frozen later
        # Gradients of stacked parameters have strides that torch would not have chosen, and torch says so.
        warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout contract")
        self.vectorize = _vectorizes_well(model) if vectorize is None else vectorize
        for owner in model.modules():
            for name, buffer in list(owner.named_buffers(recurse=False)):
                setattr(owner, name, buffer.expand(num_learners, *buffer.shape).clone())

    def forward(self, inputs: Tensor) -> Tensor:
        """Learner j sees ``inputs[j]`` only."""
        if inputs.shape[0] != self.num_learners:
            raise ValueError(
                f"inputs have {inputs.shape[0]} rows for {self.num_learners} learners: "
                "give [learners, batch, ...], one mini-batch a learner"
            )
        parameters: dict[str, Tensor] = {n: p for n, p in self.module.named_parameters() if n in self._stacks}
        buffers = dict(self.module.named_buffers())
        if self.vectorize == "measure":
            self.vectorize = self._is_faster_vectorized(parameters, buffers, inputs)
        run = self._together if self.vectorize else self._in_turn
        return run(parameters, buffers, inputs)

    def _together(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
        def one(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(self.module, (p, b), (x,))

        return vmap(one, randomness="different")(parameters, buffers, inputs)

    def _in_turn(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
        # unbind has one gradient for the whole stack; indexing row by row would add up L gradients of the size of it.
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
        """Forward and backward passes of copies, in turn; random numbers and buffers stay as they were."""
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
    """A deep copy, also of a model that keeps activations, which torch does not copy: without the graph they came from.

    One that a forward pass in vmap left behind cannot be read any more; an empty tensor stands for it.
    """
    memo: dict[int, Any] = {}  # what deepcopy takes for copied
    for module in model.modules():
        for tensor in _tensors_in(vars(module)):
            if torch._C._functorch.is_batchedtensor(tensor):
                memo[id(tensor)] = torch.empty(0)
            elif not isinstance(tensor, nn.Parameter):  # of a view that was changed since, autograd tells nothing more
                memo[id(tensor)] = tensor.data.clone()
    return copy.deepcopy(model, memo)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def single_model(stacked: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """A copy of a stacked model for one learner: parameters and buffers from ``values``, else buffers of learner 0."""
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
