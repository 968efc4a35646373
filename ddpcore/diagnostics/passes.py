"""Further forward and backward passes beside training, which leave everything as it was.

Shapes: L learners held by this process, P elements of a learner's row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ddpcore import ops
from ddpcore.learner import Learner
from ddpcore.ops import reference
from ddpcore.optim.batch import KERNEL_DTYPES

Loss = Callable[[], Tensor | Iterator[Tensor]]
"""Computes a loss anew with the model as it stands: the sum over the learners held here of their mean losses.

May yield it in parts that add up, of samples that are too many for one graph.
"""


def noise_sums(rows: Sequence[Tensor], bounds: Sequence[int], origin: Tensor | None = None) -> Tensor:
    """``ops.noise_sums``, of dtypes without a kernel by its twin."""
    kernels = ops if rows[0].dtype in KERNEL_DTYPES else reference
    return kernels.noise_sums(rows, bounds, origin)


@contextmanager
def at_weights(model: nn.Module, learner: Learner, weights_LP: Tensor) -> Iterator[None]:
    """Inside, the model's parameters are these weights. Weights in training stay where they are: others may read them.

    Buffers and random numbers are put back; no strategy hears of the passes.
    """
    flat = learner.flat
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [weights_LP.device] if weights_LP.is_cuda else []
    own = [parameter.data for parameter in flat.parameters]
    learner.is_watched = True
    try:
        with torch.random.fork_rng(devices), torch.enable_grad():
            for parameter, view in zip(flat.parameters, flat.views_of(weights_LP), strict=True):
                parameter.data = view
            yield
    finally:
        learner.is_watched = False
        for parameter, data in zip(flat.parameters, own, strict=True):
            parameter.data = data
        for buffer, value in buffers:
            buffer.data.copy_(value)


def gradient(learner: Learner, loss: Loss) -> tuple[Tensor, Tensor]:
    """``[L, P]``, of each learner's own loss, and the loss. ``.grad`` is not touched, so no hook of it runs."""
    rows_LP = torch.zeros_like(learner.flat.grad_LP)
    total = torch.zeros((), dtype=torch.float64, device=rows_LP.device)
    for part in parts_of(loss):
        _add_rows(learner, rows_LP, torch.autograd.grad(part, learner.flat.parameters, allow_unused=True))
        total += part.detach()
    return rows_LP, total


def hessian_product(learner: Learner, loss: Loss, vectors_LP: Tensor) -> Tensor:
    """``[L, P]``: each learner's Hessian, of its own loss, times its vector."""
    rows_LP, views = torch.zeros_like(vectors_LP), learner.flat.views_of(vectors_LP)
    for part in parts_of(loss):
        _add_rows(learner, rows_LP, part_product(part, learner.flat.parameters, views))
    return rows_LP


def part_product(part: Tensor, parameters: Sequence[Tensor], vectors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The Hessian of one part of a loss times a vector, both as tensors of the parameters' shapes (Pearlmutter 1994).

    None for a parameter that the product is zero of, where autograd knows it.
    """
    gradients = torch.autograd.grad(part, parameters, create_graph=True, allow_unused=True)
    terms = [(g * v).sum() for g, v in zip(gradients, vectors, strict=True) if g is not None and g.requires_grad]
    if not terms:  # a loss that is linear in its weights
        return [None] * len(parameters)
    products: Sequence[Tensor | None] = torch.autograd.grad(torch.stack(terms).sum(), parameters, allow_unused=True)
    return products


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


def _add_rows(learner: Learner, rows_LP: Tensor, tensors: Sequence[Tensor | None]) -> None:
    for view, tensor in zip(learner.flat.views_of(rows_LP), tensors, strict=True):
        if tensor is not None:
            view.add_(tensor.detach())
