"""``lars_step_``: layer-wise adaptive SGD over a list of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddpcore.ops import reference
from ddpcore.ops.library import define, no_result
from ddpcore.ops.mix import NOISE_SCHEMA, STEP_MIX_SCHEMA, Mixture, mixture_arguments
from ddpcore.ops.sgd import CLIP_SCHEMA, GROUP_SCHEMA, PASS_SCHEMA, RULE_SCHEMA, SCALING_SCHEMA, STATE_SCHEMA

_lars_step = define(
    "lars_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] masters, "
    f"Tensor(d!)[] steps, Tensor(e!) scratch, Tensor(f!) trust, {GROUP_SCHEMA}, int[] adapt, str variant, "
    f"float trust_coefficient, float eps, {RULE_SCHEMA}, {SCALING_SCHEMA}, {PASS_SCHEMA}, {STATE_SCHEMA}) -> ()",
    reference.lars_step_,
    no_result,
)

_mix_lars_step = define(
    "mix_lars_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, "
    f"Tensor(d!)[] steps, Tensor(e!) scratch, Tensor(f!) trust, {GROUP_SCHEMA}, int[] adapt, str variant, "
    f"float trust_coefficient, float eps, {RULE_SCHEMA}, {CLIP_SCHEMA}, {STEP_MIX_SCHEMA}, "
    f"{NOISE_SCHEMA}, Tensor(z!)? out) -> ()",
    reference.mix_lars_step_,
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
    squares: Tensor | None = None,
    passes: str = "both",
    state_firsts: Sequence[int] = (),
    state_seed: int = 0,
) -> None:
    """One LARS step (You, Gitman, Ginsburg 2017, algorithm 1) on every tensor, in place.

    ``R = trust_coefficient*|w| / (|g| + weight_decay*|w| + eps)`` for each tensor, or 1 if a norm is zero. Decoupled
    weight decay is not part of R.

    - ``you2017``: ``m = momentum*m + lr*R*(g + weight_decay*w); w -= m``
    - ``scaled_grad``: ``m = momentum*m + R*(g + weight_decay*w); w -= lr*m``
    - ``scaled_lr``: ``m = momentum*m + (g + weight_decay*w); w -= lr*R*m``

    All other arguments are those of :func:`ddpcore.ops.sgd_step_`.

    Args:
        trust: float64 ``[len(params), 3]``, overwritten: R, weight norm and gradient norm of each tensor.
        adapt: one per group: 0 sets R to 1.
        variant: ``you2017``, ``scaled_grad`` or ``scaled_lr``.
        trust_coefficient: eta in the paper.
        eps: added to the denominator of R.
        squares: float64 ``[len(params), 2]``: sums of squares of weights and gradients. Pass ``first`` writes them and
            ``second`` reads them; between these calls the caller adds those of other shards. None with ``both``.
        passes: ``both``, ``first`` or ``second``.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not match, or the variant is unknown.
    """
    groups = group_sizes, lr, weight_decay, device_lr, adapt
    rule = variant, trust_coefficient, eps, momentum, dampening, nesterov, decoupled
    scaling = maximize, grad_scale, found_inf, norm_squared, max_norm
    tensors = params, grads, momentum_buffers, masters, steps, scratch, trust
    _lars_step(*tensors, *groups, *rule, *scaling, squares, passes, state_firsts, state_seed)


def mix_lars_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
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
    variant: str = "you2017",
    trust_coefficient: float = 0.001,
    eps: float = 1e-8,
    momentum: float = 0.9,
    dampening: float = 0.0,
    nesterov: bool = False,
    decoupled: bool = False,
    maximize: bool = False,
    norm_squared: Tensor | None = None,
    max_norm: float = 0.0,
) -> None:
    """``mix_`` and then ``lars_step_``, bit for bit; see :func:`ddpcore.ops.mix_sgd_step_`.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not match, or the params are not in one row.
    """
    groups = group_sizes, lr, weight_decay, device_lr, adapt
    rule = variant, trust_coefficient, eps, momentum, dampening, nesterov, decoupled
    scaling = maximize, norm_squared, max_norm
    _mix_lars_step(
        params,
        grads,
        momentum_buffers,
        steps,
        scratch,
        trust,
        *groups,
        *rule,
        *scaling,
        *mixture_arguments(mixture, offsets),
    )
