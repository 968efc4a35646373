"""``sgd_step_``: momentum SGD over a list of tensors in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import library as library


def sgd_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    first_step: bool = False,
) -> None:
    """One step of ``torch.optim.SGD`` on every tensor, in place.

    ``d = g + weight_decay*w; m = momentum*m + (1-dampening)*d; w -= lr*(d + momentum*m if nesterov else m)``, in fp32
    for every storage type. A list of tensors and one flat tensor that holds them give the same bits.

    Args:
        params: float32, bfloat16 or float16 tensors of one dtype and device, dense in any order of dimensions.
        grads: one a param, of its shape, strides and dtype. Not changed.
        momentum_buffers: one a param, alike; changed in place. Empty where ``momentum`` is 0.
        lr: the learning rate.
        momentum: 0 is plain SGD.
        dampening: share of the direction that does not enter the momentum buffer.
        weight_decay: coupled (L2) decay.
        nesterov: step along ``d + momentum*m``.
        maximize: ascend.
        first_step: the momentum buffers hold nothing yet and become the direction, undampened.

    Raises:
        RuntimeError: lengths, shapes, strides, dtypes or devices do not fit.
    """
    torch.ops.ddpcore.sgd_step_(
        params,
        grads,
        momentum_buffers,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
        first_step=first_step,
    )


@torch.library.register_fake("ddpcore::sgd_step_")
def _(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first_step: bool,
) -> None:
    return None
