"""A copy of the model in training with the weights of all learners averaged, to evaluate or to keep."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddpcore.learner import Learner
from ddpcore.stacked import StackedModel, single_model

BATCH_NORM = ("average", "local", "recalibrate")


def averaged_model(model: nn.Module, learner: Learner, batch_norm: str) -> nn.Module:
    """The copy. Collective. ``model`` is left as it is; hooks on its forward pass are not copied if they do not copy.

    Args:
        model: as it trains, a ``StackedModel`` for virtual learners.
        learner: its flat weights and its connection.
        batch_norm: ``local`` keeps the floating-point buffers of the learner held here (of virtual ones the first),
            all else averages them.
    """
    flat, comm = learner.flat, learner.comm
    average_LP = flat.param_LP.clone()
    comm.average_(average_LP).wait()
    views = dict(zip(flat.names, flat.views_of(average_LP), strict=True))
    if isinstance(model, StackedModel):
        values = {name: stack[0].clone() for name, stack in views.items()}
        if batch_norm != "local":
            values |= {name: _mean_of(stack, learner) for name, stack in model.module.named_buffers()}
        return single_model(model.module, values)
    result = copy.deepcopy(model)
    for name, parameter in result.named_parameters():
        if name in views:
            parameter.data = views[name].clone()
    if batch_norm != "local":
        average_buffers(result, learner)
    return result


def _mean_of(stack: Tensor, learner: Learner) -> Tensor:
    """Of a buffer of virtual learners, one; counters are the first learner's."""
    if not stack.is_floating_point():
        return stack[0].clone()
    rows = stack.reshape(len(stack), -1).clone()
    learner.comm.average_(rows).wait()
    return rows[0].view(stack.shape[1:])


def average_buffers(model: nn.Module, learner: Learner) -> None:
    """Floating-point buffers become their mean over the ranks. Collective."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            rows = row_of(buffer).repeat(len(learner.comm.learners), 1)  # alike for all learners of a rank
            learner.comm.average_(rows).wait()
            buffer.data = rows[0].view(buffer.shape)


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Iterable[Any]) -> None:
    """Running statistics of batch normalisation anew: their plain mean over the batches, in training mode.

    The statistics of averaged weights are not the average of the statistics (Izmailov et al. 2018, section 3.2).

    Args:
        model: changed in place; its training mode is restored, also after an exception.
        batches: what the model takes, a tensor or a tuple of arguments; at least one.

    Raises:
        ValueError: there is no batch.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    modes = {module: module.training for module in model.modules()}
    momenta = [norm.momentum for norm in norms]
    try:
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # torch: a cumulative mean
            norm.train()
        count = 0
        for count, batch in enumerate(batches, start=1):  # noqa: B007
            model(*batch) if isinstance(batch, tuple | list) else model(batch)
        if not count:
            raise ValueError("recalibrate needs at least one batch: pass batches= of training inputs")
    finally:
        for module, training in modes.items():
            module.training = training
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def row_of(buffer: Tensor) -> Tensor:
    """A buffer of any shape and strides as one contiguous row ``[1, n]``; the buffer itself where it is contiguous."""
    return buffer.contiguous().view(1, -1)
