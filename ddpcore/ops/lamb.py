"""``lamb_step_``: layer-wise adaptive Adam over a list of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ddpcore.ops import reference
from ddpcore.ops.library import define
from ddpcore.ops.sgd import GROUP_SCHEMA, SCALING_SCHEMA, no_result

_lamb_step = define(
    "lamb_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] masters, Tensor(e!)[] steps, Tensor(f!) scratch, Tensor(g!) trust, "
    f"{GROUP_SCHEMA}, int[] adapt, float beta1, float beta2, float eps, bool debias, str decay_mode, float min_ratio, "
    f"float max_ratio, float min_weight_norm, float max_weight_norm, {SCALING_SCHEMA}) -> ()",
    reference.lamb_step_,
    no_result,
)


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
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
    debias: bool = True,
    decay_mode: str = "in_update",
    min_ratio: float = 0.0,
    max_ratio: float = math.inf,
    min_weight_norm: float = 0.0,
    max_weight_norm: float = math.inf,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    norm_squared: Tensor | None = None,
    max_norm: float = 0.0,
) -> None:
    """One LAMB step (You et al. 2020, algorithm 2) on every tensor, in place.

    ``m = beta1*m + (1-beta1)*g; v = beta2*v + (1-beta2)*g^2; u = m_hat/(sqrt(v_hat) + eps) + weight_decay*w``, and
    ``w -= lr * phi(|w|)/|u| * u`` with the ratio 1 where a norm is zero.

    Args:
        params: as in :func:`ddpcore.ops.sgd_step_`, like all that is not named here.
        grads: see there.
        exp_avgs: m, float32, one a param; changed in place.
        exp_avg_sqs: v, float32, one a param; changed in place.
        masters: see there.
        steps: one float32 a group: steps taken so far, raised by one; corrects the bias.
        scratch: see :func:`new_scratch`; float64 on the device, zero at first.
        trust: float64 ``[len(params), 3]``, written: ratio, weight norm and update norm of each tensor.
        lr: one a group.
        weight_decay: one a group.
        group_sizes: see there.
        adapt: one a group: 0 makes the ratio 1.
        device_lr: see there.
        beta1: decay of m.
        beta2: decay of v.
        eps: added to the root.
        debias: whether m and v are divided by ``1 - beta^step``.
        decay_mode: ``in_update`` (the paper), ``coupled`` (decay joins the gradient) or ``decoupled`` (decay outside of
            the ratio, ``w *= 1 - lr*weight_decay``).
        min_ratio: lower bound of the ratio.
        max_ratio: upper bound of the ratio.
        min_weight_norm: lower bound of phi.
        max_weight_norm: upper bound of phi.
        maximize: see there.
        grad_scale: see there.
        found_inf: see there.
        norm_squared: see there.
        max_norm: see there.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not fit, or the decay mode is unknown.
    """
    _lamb_step(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        masters,
        steps,
        scratch,
        trust,
        group_sizes,
        lr,
        weight_decay,
        device_lr,
        adapt,
        beta1,
        beta2,
        eps,
        debias,
        decay_mode,
        min_ratio,
        max_ratio,
        min_weight_norm,
        max_weight_norm,
        maximize,
        grad_scale,
        found_inf,
        norm_squared,
        max_norm,
    )
