"""``lamb_step_``: layer-wise adaptive Adam over a list of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ddpcore.ops import reference
from ddpcore.ops.library import define, no_result
from ddpcore.ops.options import GROUP_SCHEMA, SCALING_SCHEMA, ScalingOptions

_lamb_step = define(
    "lamb_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    f"Tensor(d!)[] masters, Tensor(e!)[] steps, Tensor(f!) scratch, Tensor(g!) trust, *, {GROUP_SCHEMA}, int[] adapt, "
    "float beta1=0.9, float beta2=0.999, float eps=1e-06, bool debias=True, str decay_mode='in_update', "
    "float min_ratio=0.0, float max_ratio, float min_weight_norm=0.0, float max_weight_norm, "
    f"bool maximize=False, {SCALING_SCHEMA}) -> ()",
    reference.lamb_step_,
    no_result,
)


class LambOptions(ScalingOptions, total=False):
    """Options of :func:`lamb_step_` that are the same for all groups.

    Attributes:
        beta1: decay rate of m. Default: 0.9.
        beta2: decay rate of v. Default: 0.999.
        eps: added to the square root. Default: 1e-6.
        debias: divide m and v by ``1 - beta^step``. Default: True.
        decay_mode: ``in_update`` (default, the paper), ``coupled`` (decay is added to the gradient) or ``decoupled``
            (``w *= 1 - lr*weight_decay``, not scaled by the ratio).
        min_ratio: lower bound of the ratio. Default: 0.
        max_ratio: upper bound of the ratio. Default: infinity.
        min_weight_norm: lower bound of phi. Default: 0.
        max_weight_norm: upper bound of phi. Default: infinity.
        maximize: ascend instead of descend. Default: False.
    """

    beta1: float
    beta2: float
    eps: float
    debias: bool
    decay_mode: str
    min_ratio: float
    max_ratio: float
    min_weight_norm: float
    max_weight_norm: float
    maximize: bool


def lamb_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
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
    **options: Unpack[LambOptions],
) -> None:
    """One LAMB step (You et al. 2020, algorithm 2) on every tensor, in place.

    ``m = beta1*m + (1-beta1)*g; v = beta2*v + (1-beta2)*g^2; u = m_hat/(sqrt(v_hat) + eps) + weight_decay*w``, and
    ``w -= lr * phi(|w|)/|u| * u``. The ratio ``phi(|w|)/|u|`` is 1 if a norm is zero; phi clamps ``|w|``.

    Args:
        params, grads, masters: see :func:`ddpcore.ops.sgd_step_`.
        exp_avgs: m, float32, one per parameter; changed in place.
        exp_avg_sqs: v, float32, one per parameter; changed in place.
        steps: one float32 per group: the number of steps taken so far, increased by one.
        scratch: see :func:`new_scratch`; float64 on the parameters' device, zero at first.
        trust: float64 ``[len(params), 3]``, overwritten: ratio, weight norm and update norm of each tensor.
        lr, weight_decay, group_sizes: one per group, see :func:`ddpcore.ops.sgd_step_`.
        adapt: one per group: 0 sets the ratio to 1.
        device_lr: see :func:`ddpcore.ops.sgd_step_`.
        **options: see :class:`LambOptions`.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not match, or the decay mode is unknown.
    """
    groups: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "group_sizes": group_sizes, "adapt": adapt}
    bounds = {"max_ratio": math.inf, "max_weight_norm": math.inf}  # a schema cannot have infinity as a default
    tensors = params, grads, exp_avgs, exp_avg_sqs, masters, steps, scratch, trust
    _lamb_step(*tensors, device_lr=device_lr, **groups, **{**bounds, **options})
