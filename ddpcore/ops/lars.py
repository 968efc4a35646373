"""``lars_step_``: layer-wise adaptive SGD over a list of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddpcore.ops import reference
from ddpcore.ops.library import define
from ddpcore.ops.sgd import GROUP_SCHEMA, RULE_SCHEMA, SCALING_SCHEMA, no_result

_lars_step = define(
    "lars_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] masters, "
    f"Tensor(d!)[] steps, Tensor(e!) scratch, Tensor(f!) trust, {GROUP_SCHEMA}, int[] adapt, str variant, "
    f"float trust_coefficient, float eps, {RULE_SCHEMA}, {SCALING_SCHEMA}) -> ()",
    reference.lars_step_,
    no_result,
)


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
    variant: str = "you2017",
    trust_coefficient: float = 0.001,
    eps: float = 1e-8,
    momentum: float = 0.9,
    dampening: float = 0.0,
    nesterov: bool = False,
    decoupled: bool = False,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    norm_squared: Tensor | None = None,
    max_norm: float = 0.0,
) -> None:
    """One LARS step (You, Gitman, Ginsburg 2017, algorithm 1) on every tensor, in place.

    With ``R = trust_coefficient*|w| / (|g| + weight_decay*|w| + eps)`` for each tensor, and 1 where a norm is zero:

    - ``you2017``: ``m = momentum*m + lr*R*(g + weight_decay*w); w -= m``
    - ``scaled_grad``: ``m = momentum*m + R*(g + weight_decay*w); w -= lr*m``
    - ``scaled_lr``: ``m = momentum*m + (g + weight_decay*w); w -= lr*R*m``

    Args:
        params: as in :func:`ddpcore.ops.sgd_step_`, like all that is not named here.
        grads: see there.
        momentum_buffers: see there.
        masters: see there.
        steps: see there.
        scratch: see :func:`new_scratch`; float64 on the device, zero at first.
        trust: float64 ``[len(params), 3]``, written: R, weight norm and gradient norm of each tensor.
        lr: one a group.
        weight_decay: one a group. Decoupled decay is no part of R.
        group_sizes: see there.
        adapt: one a group: 0 makes R = 1.
        device_lr: see there.
        variant: ``you2017``, ``scaled_grad`` or ``scaled_lr``.
        trust_coefficient: eta in the paper.
        eps: added to the denominator of R.
        momentum: see there.
        dampening: see there.
        nesterov: see there.
        decoupled: see there.
        maximize: see there.
        grad_scale: see there.
        found_inf: see there.
        norm_squared: see there.
        max_norm: see there.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not fit, or the variant is unknown.
    """
    _lars_step(
        params,
        grads,
        momentum_buffers,
        masters,
        steps,
        scratch,
        trust,
        group_sizes,
        lr,
        weight_decay,
        device_lr,
        adapt,
        variant,
        trust_coefficient,
        eps,
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
