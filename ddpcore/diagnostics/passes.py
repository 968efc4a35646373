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

Loss = Callable[[], Tensor]
"""Computes a loss anew with the model as it stands: the sum over the learners held here of their mean losses."""


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


def gradient(learner: Learner, loss: Loss) -> Tensor:
    """``[L, P]``, of each learner's own loss. ``.grad`` is not touched, so no hook of it runs."""
    return _rows_of(learner, torch.autograd.grad(_scalar(loss()), learner.flat.parameters, allow_unused=True))


def hessian_product(learner: Learner, loss: Loss, vectors_LP: Tensor) -> Tensor:
    """``[L, P]``: each learner's Hessian, of its own loss, times its vector (Pearlmutter 1994)."""
    parameters = learner.flat.parameters
    gradients = torch.autograd.grad(_scalar(loss()), parameters, create_graph=True, allow_unused=True)
    views = learner.flat.views_of(vectors_LP)
    terms = [(g * v).sum() for g, v in zip(gradients, views, strict=True) if g is not None and g.requires_grad]
    if not terms:  # a loss that is linear in its weights
        return torch.zeros_like(vectors_LP)
    products = torch.autograd.grad(torch.stack(terms).sum(), parameters, allow_unused=True)
    return _rows_of(learner, products)


def _scalar(loss: Tensor) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ValueError("loss= and full_loss= must return the loss as one number with a graph: call the model inside")
    return loss.reshape(())


def _rows_of(learner: Learner, tensors: Sequence[Tensor | None]) -> Tensor:
    rows_LP = torch.zeros_like(learner.flat.grad_LP)
    for view, tensor in zip(learner.flat.views_of(rows_LP), tensors, strict=True):
        if tensor is not None:
            view.copy_(tensor.detach())
    return rows_LP
