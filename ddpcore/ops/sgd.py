"""``sgd_step_``: momentum SGD over a list of tensors in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ddpcore.ops import reference
from ddpcore.ops.library import define

GROUP_SCHEMA = "int[] group_sizes, float[] lr, float[] weight_decay, Tensor[] device_lr"
RULE_SCHEMA = "float momentum, float dampening, bool nesterov, bool decoupled"
SCALING_SCHEMA = "bool maximize, Tensor? grad_scale, Tensor? found_inf, Tensor? norm_squared, float max_norm"


def no_result(*args: Any, **kwargs: Any) -> None:
    """The fake of an operator that only writes."""


_sgd_step = define(
    "sgd_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] masters, "
    f"Tensor(d!)[] steps, Tensor(e!)? scratch, {GROUP_SCHEMA}, {RULE_SCHEMA}, {SCALING_SCHEMA}) -> ()",
    reference.sgd_step_,
    no_result,
)


def sgd_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] = (),
    masters: Sequence[Tensor] = (),
    steps: Sequence[Tensor] = (),
    scratch: Tensor | None = None,
    *,
    lr: Sequence[float] | float,
    weight_decay: Sequence[float] | float = 0.0,
    group_sizes: Sequence[int] | None = None,
    device_lr: Sequence[Tensor] = (),
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    decoupled: bool = False,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    norm_squared: Tensor | None = None,
    max_norm: float = 0.0,
) -> None:
    """One step of ``torch.optim.SGD`` on every tensor, in place.

    ``d = g + weight_decay*w; m = momentum*m + (1-dampening)*d; w -= lr*(d + momentum*m if nesterov else m)``, in fp32
    for every storage type. A list of tensors and one flat tensor that holds them give the same bits. Tensors that are
    not dense, and gradients and buffers with other strides than their param, are right but are copied for the step.

    Args:
        params: float32, bfloat16 or float16 tensors of one dtype and device.
        grads: one a param, of its shape and dtype. Not changed.
        momentum_buffers: one a param, alike (float32 beside masters); changed in place. Empty where ``momentum`` is 0.
        masters: empty, or one a param: the float32 weights behind 16-bit params. A master that no longer rounds to its
            param is overruled by it.
        steps: empty, or one float32 a group: steps taken so far, raised by one. At 0 the buffers hold nothing yet and
            become the direction, undampened.
        scratch: needed with ``steps``: see :func:`new_scratch`. It may be shared by steps that follow each other.
        lr: learning rate, one a group or one for all.
        weight_decay: coupled (L2) decay, one a group or one for all.
        group_sizes: how many of the params are of the first group, of the second, ...; None: all are of one.
        device_lr: empty, or one float32 a group, on the device, read instead of ``lr``.
        momentum: 0 is plain SGD.
        dampening: share of the direction that does not enter the momentum buffer.
        nesterov: step along ``d + momentum*m``.
        decoupled: weight decay multiplies the weight by ``1 - lr*weight_decay`` instead of joining the gradient.
        maximize: ascend.
        grad_scale: one float32: the gradients are so many times too large.
        found_inf: one float32: where it is not 0, nothing is changed or counted.
        norm_squared: one float64, the squared norm of all gradients as they are stored, for ``max_norm``.
        max_norm: longer gradients count as if they were this long; 0: never.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not fit.
    """
    _sgd_step(
        params,
        grads,
        momentum_buffers,
        masters,
        steps,
        scratch,
        [len(params)] if group_sizes is None else group_sizes,
        [lr] if isinstance(lr, (int, float)) else lr,
        [weight_decay] if isinstance(weight_decay, (int, float)) else weight_decay,
        device_lr,
        momentum,
        dampening,
        nesterov,
        decoupled,
        maximize,
        grad_scale,
        found_inf,
        norm_squared,
        max_norm,
    )
