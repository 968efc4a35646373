"""``lars_step_``: layer-wise adaptive SGD over a list of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ddpcore.ops import reference
from ddpcore.ops.library import define, no_result
from ddpcore.ops.options import GROUP_SCHEMA, MOMENTUM_SCHEMA, SCALING_SCHEMA, MomentumOptions, ScalingOptions

_lars_step = define(
    "lars_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] masters, "
    f"Tensor(d!)[] steps, Tensor(e!) scratch, Tensor(f!) trust, *, {GROUP_SCHEMA}, int[] adapt, "
    f"str variant='you2017', float trust_coefficient=0.001, float eps=1e-08, float momentum=0.9, {MOMENTUM_SCHEMA}, "
    f"bool maximize=False, {SCALING_SCHEMA}) -> ()",
    reference.lars_step_,
    no_result,
)


class LarsOptions(MomentumOptions, ScalingOptions, total=False):
    """Options of :func:`lars_step_` that are the same for all groups. ``momentum`` defaults to 0.9.

    Attributes:
        variant: ``you2017`` (default), ``scaled_grad`` or ``scaled_lr``.
        trust_coefficient: eta in the paper. Default: 0.001.
        eps: added to the denominator of R. Default: 1e-8.
    """

    variant: str
    trust_coefficient: float
    eps: float


def lars_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    masters: Sequence[Tensor],
    steps: Sequence[Tensor],
    scratch: Tensor,
    trust: Tensor,
    *,
    lr: Sequence[float],
    weight_decay: Sequence[float],
    group_sizes: Sequence[int],
    adapt: Sequence[int],
    device_lr: Sequence[Tensor] = (),
    **options: Unpack[LarsOptions],
) -> None:
    """One LARS step (You, Gitman, Ginsburg 2017, algorithm 1) on every tensor, in place.

    ``R = trust_coefficient*|w| / (|g| + weight_decay*|w| + eps)`` for each tensor, or 1 if a norm is zero. Decoupled
    weight decay is not part of R.

    - ``you2017``: ``m = momentum*m + lr*R*(g + weight_decay*w); w -= m``
    - ``scaled_grad``: ``m = momentum*m + R*(g + weight_decay*w); w -= lr*m``
    - ``scaled_lr``: ``m = momentum*m + (g + weight_decay*w); w -= lr*R*m``

    Args:
        params, grads, momentum_buffers, masters, steps: see :func:`ddpcore.ops.sgd_step_`.
        scratch: see :func:`new_scratch`; float64 on the parameters' device, zero at first.
        trust: float64 ``[len(params), 3]``, overwritten: R, weight norm and gradient norm of each tensor.
        lr, weight_decay, group_sizes: one per group, see :func:`ddpcore.ops.sgd_step_`.
        adapt: one per group: 0 sets R to 1.
        device_lr: see :func:`ddpcore.ops.sgd_step_`.
        **options: see :class:`LarsOptions`.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not match, or the variant is unknown.
    """
    groups: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "group_sizes": group_sizes, "adapt": adapt}
    tensors = params, grads, momentum_buffers, masters, steps, scratch, trust
    _lars_step(*tensors, device_lr=device_lr, **groups, **options)
