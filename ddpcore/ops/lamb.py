"""``lamb_step_``: layer-wise adaptive Adam over a list of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ddpcore.ops import reference
from ddpcore.ops.library import define, no_result
from ddpcore.ops.mix import NOISE_SCHEMA, STEP_MIX_SCHEMA, Mixture, mixture_arguments
from ddpcore.ops.sgd import CLIP_SCHEMA, GROUP_SCHEMA, PASS_SCHEMA, SCALING_SCHEMA, STATE_SCHEMA

_lamb_step = define(
    "lamb_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] masters, Tensor(e!)[] steps, Tensor(f!) scratch, Tensor(g!) trust, "
    f"{GROUP_SCHEMA}, int[] adapt, float beta1, float beta2, float eps, bool debias, str decay_mode, float min_ratio, "
    f"float max_ratio, float min_weight_norm, float max_weight_norm, {SCALING_SCHEMA}, "
    f"{PASS_SCHEMA}, {STATE_SCHEMA}) -> ()",
    reference.lamb_step_,
    no_result,
)

_mix_lamb_step = define(
    "mix_lamb_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(e!)[] steps, Tensor(f!) scratch, Tensor(g!) trust, "
    f"{GROUP_SCHEMA}, int[] adapt, float beta1, float beta2, float eps, bool debias, str decay_mode, float min_ratio, "
    f"float max_ratio, float min_weight_norm, float max_weight_norm, {CLIP_SCHEMA}, {STEP_MIX_SCHEMA}, "
    f"{NOISE_SCHEMA}, Tensor(z!)? out) -> ()",
    reference.mix_lamb_step_,
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
    squares: Tensor | None = None,
    passes: str = "both",
    state_firsts: Sequence[int] = (),
    state_seed: int = 0,
) -> None:
    """One LAMB step (You et al. 2020, algorithm 2) on every tensor, in place.

    ``m = beta1*m + (1-beta1)*g; v = beta2*v + (1-beta2)*g^2; u = m_hat/(sqrt(v_hat) + eps) + weight_decay*w``, and
    ``w -= lr * phi(|w|)/|u| * u``. The ratio ``phi(|w|)/|u|`` is 1 if a norm is zero; phi clamps ``|w|``.

    All other arguments are those of :func:`ddpcore.ops.sgd_step_`.

    Args:
        exp_avgs, exp_avg_sqs: m and v, float32 (bfloat16 with ``state_firsts``), one per parameter; changed in place.
        trust: float64 ``[len(params), 3]``, overwritten: ratio, weight norm and update norm of each tensor.
        adapt: one per group: 0 sets the ratio to 1.
        beta1, beta2, eps, debias: as in the equation. Without debias, m_hat is m and v_hat is v.
        decay_mode: ``in_update`` (the paper), ``coupled`` (added to the gradient) or ``decoupled`` (without the ratio).
        min_ratio, max_ratio, min_weight_norm, max_weight_norm: bounds of the ratio and of phi.
        squares: float64 ``[len(params), 2]``: sums of squares of weights and updates. Pass ``first`` writes them and
            ``second`` reads them; between these calls the caller adds those of other shards. None with ``both``.
        passes: ``both``, ``first`` or ``second``.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not match, or the decay mode is unknown.
    """
    tensors = params, grads, exp_avgs, exp_avg_sqs, masters, steps, scratch, trust
    groups = group_sizes, lr, weight_decay, device_lr, adapt
    rule = beta1, beta2, eps, debias, decay_mode, min_ratio, max_ratio, min_weight_norm, max_weight_norm
    scaling = maximize, grad_scale, found_inf, norm_squared, max_norm
    _lamb_step(*tensors, *groups, *rule, *scaling, squares, passes, state_firsts, state_seed)


def mix_lamb_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    scratch: Tensor,
    trust: Tensor,
    mixture: Mixture,
    offsets: Sequence[int],
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
    norm_squared: Tensor | None = None,
    max_norm: float = 0.0,
) -> None:
    """``mix_`` and then ``lamb_step_``, bit for bit; see :func:`ddpcore.ops.mix_sgd_step_`.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not match, or the params are not in one row.
    """
    tensors = params, grads, exp_avgs, exp_avg_sqs, steps, scratch, trust
    groups = group_sizes, lr, weight_decay, device_lr, adapt
    rule = beta1, beta2, eps, debias, decay_mode, min_ratio, max_ratio, min_weight_norm, max_weight_norm
    _mix_lamb_step(*tensors, *groups, *rule, maximize, norm_squared, max_norm, *mixture_arguments(mixture, offsets))
