"""``adamw_step_``: Adam over a list of tensors in one launch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddpcore.ops import reference
from ddpcore.ops.library import define, no_result
from ddpcore.ops.mix import NOISE_SCHEMA, STEP_MIX_SCHEMA, Mixture, mixture_arguments
from ddpcore.ops.sgd import CLIP_SCHEMA, GROUP_SCHEMA, SCALING_SCHEMA, STATE_SCHEMA

_adamw_step = define(
    "adamw_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    f"Tensor(d!)[] masters, Tensor(e!)[] steps, Tensor(f!) scratch, {GROUP_SCHEMA}, float beta1, float beta2, "
    f"float eps, bool decoupled, {SCALING_SCHEMA}, {STATE_SCHEMA}) -> ()",
    reference.adamw_step_,
    no_result,
)

_mix_adamw_step = define(
    "mix_adamw_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    f"Tensor(e!)[] steps, Tensor(f!) scratch, {GROUP_SCHEMA}, float beta1, float beta2, "
    f"float eps, bool decoupled, {CLIP_SCHEMA}, {STEP_MIX_SCHEMA}, "
    f"{NOISE_SCHEMA}, Tensor(z!)? out) -> ()",
    reference.mix_adamw_step_,
    no_result,
)


def adamw_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor],
    steps: Sequence[Tensor],
    scratch: Tensor,
    *,
    lr: Sequence[float],
    weight_decay: Sequence[float],
    group_sizes: Sequence[int],
    device_lr: Sequence[Tensor] = (),
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    decoupled: bool = True,
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    norm_squared: Tensor | None = None,
    max_norm: float = 0.0,
    state_firsts: Sequence[int] = (),
    state_seed: int = 0,
) -> None:
    """One step of ``torch.optim.AdamW`` or ``Adam`` on every tensor, in place.

    ``m = beta1*m + (1-beta1)*g; v = beta2*v + (1-beta2)*g^2; w -= lr * m_hat/(sqrt(v_hat) + eps)``, with ``m_hat =
    m/(1-beta1^t)`` and ``v_hat = v/(1-beta2^t)`` at step t. It has the bits of ``lamb_step_`` without a ratio.

    All other arguments are those of :func:`ddpcore.ops.sgd_step_`.

    Args:
        exp_avgs, exp_avg_sqs: m and v, float32 (bfloat16 with ``state_firsts``), one per parameter; changed in place.
        steps: one float32 per group: the number of steps taken so far, increased by one.
        scratch: see :func:`new_scratch`; float64 on the parameters' device, zero at first.
        beta1, beta2: decay rates of m and v.
        eps: added to the square root.
        decoupled: weight decay first multiplies w by ``1 - lr*weight_decay`` (AdamW), else it is added to g (Adam).

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not match.
    """
    tensors = params, grads, exp_avgs, exp_avg_sqs, masters, steps, scratch
    rule = beta1, beta2, eps, decoupled
    scaling = maximize, grad_scale, found_inf, norm_squared, max_norm
    _adamw_step(*tensors, group_sizes, lr, weight_decay, device_lr, *rule, *scaling, state_firsts, state_seed)


def mix_adamw_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    scratch: Tensor,
    mixture: Mixture,
    offsets: Sequence[int],
    *,
    lr: Sequence[float],
    weight_decay: Sequence[float],
    group_sizes: Sequence[int],
    device_lr: Sequence[Tensor] = (),
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    decoupled: bool = True,
    maximize: bool = False,
    norm_squared: Tensor | None = None,
    max_norm: float = 0.0,
) -> None:
    """``mix_`` and then ``adamw_step_``, bit for bit; see :func:`ddpcore.ops.mix_sgd_step_`.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not match, or the params are not in one row.
    """
    tensors = params, grads, exp_avgs, exp_avg_sqs, steps, scratch
    rule = beta1, beta2, eps, decoupled
    scaling = maximize, norm_squared, max_norm
    _mix_adamw_step(
        *tensors, group_sizes, lr, weight_decay, device_lr, *rule, *scaling, *mixture_arguments(mixture, offsets)
    )
