"""Further forward and backward passes beside training, which leave everything as it was.

Shapes: L learners held by this process, P elements of a learner's row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ddpcore import ops
from ddpcore.ops import reference
from ddpcore.ops.dtypes import KERNEL_DTYPES
from ddpcore.strategies.learner import Learner

Loss = Callable[[], Tensor | Iterator[Tensor]]
"""Computes a loss anew with the model as it stands: the sum over the learners held here of their mean losses.

May yield it in parts that add up, of samples that are too many for one graph.
"""


def noise_sums(rows: Sequence[Tensor], bounds: Sequence[int], origin: Tensor | None = None) -> Tensor:
    """``ops.noise_sums``, of dtypes without a kernel by its twin."""
    kernels = ops if rows[0].dtype in KERNEL_DTYPES else reference
    return kernels.noise_sums(rows, bounds, origin)


class RandomState:
    """The global generators as they stand: torch's of the CPU and of one device, NumPy's and Python's."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = (device, torch.cuda.get_rng_state(device)) if device.type == "cuda" else None
        self._cpu, self._numpy, self._python = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def restore(self) -> None:
        """Make them stand so again."""
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda[1], self._cuda[0])
        torch.set_rng_state(self._cpu)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


@contextmanager
def as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Afterwards buffers and the global generators are what they were before, also where a module took new tensors."""
    buffers = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    before = RandomState(device)
    try:
        yield
    finally:
        before.restore()
        for owner, name, buffer, value in buffers:
            buffer.data.copy_(value)
            owner[name] = buffer


@contextmanager
def at_weights(
    model: nn.Module, learner: Learner, weights_LP: Tensor, random_state: RandomState | None = None
) -> Iterator[None]:
    """Inside, the model's parameters are these weights. Weights in training stay where they are: others may read them.

    Buffers and random numbers are put back; no strategy hears of the passes.

    Args:
        model: the one that is trained.
        learner: its learners.
        weights_LP: what to take in place of theirs.
        random_state: what the passes begin with; None goes on with the generators as they stand.
    """
    flat = learner.flat
    own = [parameter.data for parameter in flat.parameters]
    learner.hooks_paused = True
    try:
        with as_it_was(model, weights_LP.device), torch.enable_grad():
            if random_state is not None:
                random_state.restore()
            for parameter, view in zip(flat.parameters, flat.views_of(weights_LP), strict=True):
                parameter.data = view
            yield
    finally:
        learner.hooks_paused = False
        for parameter, data in zip(flat.parameters, own, strict=True):
            parameter.data = data


def gradient(learner: Learner, loss: Loss, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``[L, P]``, of each learner's own loss, and the loss. ``.grad`` is not touched, so no hook of it runs.

    With mixed precision small gradients vanish unless the loss is scaled: ``scale`` is taken back at the end.
    """
    rows_LP = torch.zeros_like(learner.flat.grad_LP)
    parameters, views = _trained(learner, rows_LP)
    total = torch.zeros((), dtype=torch.float64, device=rows_LP.device)
    for part in parts_of(loss):
        _add(views, torch.autograd.grad(_scaled(part, scale), parameters, allow_unused=True))
        total += part.detach()
    return _unscaled(rows_LP, scale), total


def hessian_product(learner: Learner, loss: Loss, vectors_LP: Tensor, scale: Tensor | None = None) -> Tensor:
    """``[L, P]``: each learner's Hessian, of its own loss, times its vector.

    Raises:
        ValueError: the loss goes through a compiled model, which has no second derivatives.
    """
    rows_LP = torch.zeros_like(vectors_LP)
    parameters, views = _trained(learner, rows_LP)
    _, vectors = _trained(learner, vectors_LP)
    try:
        with twice_differentiable():
            for part in parts_of(loss):
                _add(views, part_product(_scaled(part, scale), parameters, vectors))
    except RuntimeError as error:
        if "donated buffer" not in str(error) and "aot_autograd" not in str(error):
            raise
        raise ValueError("hessian=True differentiates twice: full_loss must call the model uncompiled") from error
    return _unscaled(rows_LP, scale)


def twice_differentiable() -> AbstractContextManager[None]:
    """Inside, attention goes by matrix products and a softmax: torch's fused kernels have no second derivatives."""
    return sdpa_kernel(SDPBackend.MATH)


def part_product(part: Tensor, parameters: Sequence[Tensor], vectors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The Hessian of one part of a loss times a vector, both as tensors of the parameters' shapes (Pearlmutter 1994).

    None for a parameter that the product is zero of, where autograd knows it. The part must have been computed inside
    of :func:`twice_differentiable`.
    """
    gradients = torch.autograd.grad(part, parameters, create_graph=True, allow_unused=True)
    terms = [(g * v).sum() for g, v in zip(gradients, vectors, strict=True) if g is not None and g.requires_grad]
    if not terms:  # a loss that is linear in its weights
        return [None] * len(parameters)
    products: Sequence[Tensor | None] = torch.autograd.grad(torch.stack(terms).sum(), parameters, allow_unused=True)
    return products


def scale_of(scaler: torch.amp.GradScaler | None, device: torch.device) -> Tensor | None:
    """By what the loss is multiplied before a backward pass; None where by nothing."""
    if scaler is None or not scaler.is_enabled():
        return None
    scale = scaler.scale(torch.ones((), dtype=torch.float32, device=device))
    assert isinstance(scale, Tensor)
    return scale


def unscale_squared(scaler: torch.amp.GradScaler | None, like: Tensor) -> Tensor | float:
    """What undoes the scale of squares of gradients as the backward pass leaves them."""
    scale = scale_of(scaler, like.device)
    return 1.0 if scale is None else scale.double().square().reciprocal()


def parts_of(loss: Loss) -> Iterator[Tensor]:
    """The parts of a loss, each one number with a graph of its own.

    Raises:
        ValueError: it is none.
    """
    result = loss()
    for part in result if isinstance(result, Iterator) else (result,):
        if not isinstance(part, Tensor) or part.numel() != 1 or not part.requires_grad:
            raise ValueError(
                "loss= and full_loss= must return the loss as one number with a graph, or yield parts of it: call the "
                "model inside"
            )
        yield part.reshape(())


def _trained(learner: Learner, rows_LP: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that need a gradient, some may have been frozen on the way, and their places in these rows."""
    pairs = zip(learner.flat.parameters, learner.flat.views_of(rows_LP), strict=True)
    chosen = [(parameter, view) for parameter, view in pairs if parameter.requires_grad]
    return [parameter for parameter, _ in chosen], [view for _, view in chosen]


def _add(views: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> None:
    for view, tensor in zip(views, tensors, strict=True):
        if tensor is not None:
            view.add_(tensor.detach())


def _scaled(part: Tensor, scale: Tensor | None) -> Tensor:
    return part if scale is None else part * scale.to(part)


def _unscaled(rows_LP: Tensor, scale: Tensor | None) -> Tensor:
    return rows_LP if scale is None else rows_LP.mul_(scale.double().reciprocal().to(rows_LP))
