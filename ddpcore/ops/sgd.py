"""``sgd_step_``: momentum SGD over a list of tensors in one launch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import Unpack

from ddpcore.ops import reference
from ddpcore.ops.library import define, no_result
from ddpcore.ops.options import GROUP_SCHEMA, MOMENTUM_SCHEMA, SCALING_SCHEMA, MomentumOptions, ScalingOptions

_sgd_step = define(
    "sgd_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] masters, "
    f"Tensor(d!)[] steps, Tensor(e!)? scratch, *, {GROUP_SCHEMA}, float momentum=0.0, {MOMENTUM_SCHEMA}, "
    f"bool maximize=False, {SCALING_SCHEMA}) -> ()",
    reference.sgd_step_,
    no_result,
)


class SgdOptions(MomentumOptions, ScalingOptions, total=False):
    """Options of :func:`sgd_step_` that are the same for all groups. ``momentum`` defaults to 0."""


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
    **options: Unpack[SgdOptions],
) -> None:
    """One step of ``torch.optim.SGD`` on every tensor, in place.

    ``d = g + weight_decay*w; m = momentum*m + (1-dampening)*d; w -= lr*(d + momentum*m if nesterov else m)``, in fp32
    for every dtype. A list of tensors and one flat tensor with the same elements give the same bits. Tensors that are
    not dense, and gradients and buffers with other strides than their parameter, are copied for the step.

    Args:
        params: float32, bfloat16 or float16 tensors of one dtype and device.
        grads: one per parameter, with its shape and dtype. Not changed.
        momentum_buffers: one per parameter, with its shape and dtype (float32 if there are masters); changed in place.
            Empty if ``momentum`` is 0.
        masters: empty, or one float32 copy of the weights per 16-bit parameter. An element that does not round to the
            parameter's element is out of date: the step starts from the parameter there.
        steps: empty, or one float32 per group: the number of steps taken so far, increased by one. At 0 the buffers are
            not read, and become the direction without dampening.
        scratch: required with ``steps``, see :func:`new_scratch`. Steps that run one after another may share it.
        lr: learning rate, one per group or one for all.
        weight_decay: coupled (L2) decay, one per group or one for all.
        group_sizes: the number of parameters of each group, in order. None: one group has all.
        device_lr: empty, or one float32 per group on the parameters' device, read instead of ``lr``.
        **options: see :class:`ddpcore.ops.options.MomentumOptions` and :class:`ddpcore.ops.options.ScalingOptions`.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not match.
    """
    groups = {
        "group_sizes": [len(params)] if group_sizes is None else group_sizes,
        "lr": [lr] if isinstance(lr, (int, float)) else lr,
        "weight_decay": [weight_decay] if isinstance(weight_decay, (int, float)) else weight_decay,
    }
    _sgd_step(params, grads, momentum_buffers, masters, steps, scratch, device_lr=device_lr, **groups, **options)
