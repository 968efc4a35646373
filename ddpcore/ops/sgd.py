"""``sgd_step_``: momentum SGD over a list of tensors in one launch.

**Rounded states**, of all steps: ``state_firsts`` is empty, or has for each parameter the index of its first element
among the random numbers, a multiple of 4. Then momentum and moments are bfloat16, and are rounded stochastically by the
random bits of (``state_seed``, step count, index + place of the element in memory). This needs ``steps`` and takes no
masters. SGD and LARS step along the momentum before it is rounded; Adam and LAMB use the moments as they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddpcore.ops import reference
from ddpcore.ops.library import define, no_result
from ddpcore.ops.mix import NOISE_SCHEMA, STEP_MIX_SCHEMA, Mixture, mixture_arguments

GROUP_SCHEMA = "int[] group_sizes, float[] lr, float[] weight_decay, Tensor[] device_lr"
RULE_SCHEMA = "float momentum, float dampening, bool nesterov, bool decoupled"
CLIP_SCHEMA = "bool maximize, Tensor? norm_squared, float max_norm"
SCALING_SCHEMA = "bool maximize, Tensor? grad_scale, Tensor? found_inf, Tensor? norm_squared, float max_norm"
PASS_SCHEMA = "Tensor(s!)? squares=None, str passes='both'"
STATE_SCHEMA = "int[] state_firsts=[], int state_seed=0"

_sgd_step = define(
    "sgd_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] masters, "
    f"Tensor(d!)[] steps, Tensor(e!)? scratch, {GROUP_SCHEMA}, {RULE_SCHEMA}, {SCALING_SCHEMA}, {STATE_SCHEMA}) -> ()",
    reference.sgd_step_,
    no_result,
)
_mix_sgd_step = define(
    "mix_sgd_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] steps, "
    f"Tensor(d!)? scratch, {GROUP_SCHEMA}, {RULE_SCHEMA}, {CLIP_SCHEMA}, {STEP_MIX_SCHEMA}, "
    f"{NOISE_SCHEMA}, Tensor(z!)? out) -> ()",
    reference.mix_sgd_step_,
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
    state_firsts: Sequence[int] = (),
    state_seed: int = 0,
) -> None:
    """One step of ``torch.optim.SGD`` on every tensor, in place.

    ``d = g + weight_decay*w; m = momentum*m + (1-dampening)*d; w -= lr*(d + momentum*m if nesterov else m)``, in fp32
    for every dtype. A list and one flat tensor of the same elements give the same bits. Tensors that are not dense, and
    gradients and buffers with other strides than their parameter, are copied for the step.

    Args:
        params: float32, bfloat16 or float16 tensors of one dtype and device.
        grads: one per parameter, with its shape and dtype. Not changed.
        momentum_buffers: like ``grads`` (float32 with masters), changed in place. Empty if ``momentum`` is 0.
        masters: empty, or one float32 copy of the weights per 16-bit parameter. Where a master does not round to its
            parameter, the step starts from the parameter.
        steps: empty, or one float32 per group: steps taken so far, increased by one. At 0 the momentum buffers are not
            read, and become the direction without dampening.
        scratch: required with ``steps``: see :func:`new_scratch`.
        lr, weight_decay: learning rate and coupled (L2) decay, one per group or one for all.
        group_sizes: the number of parameters of each group, in order. None: one group has all.
        device_lr: empty, or one float32 per group on the parameters' device, read instead of ``lr``.
        momentum, dampening, nesterov: as in the equation.
        decoupled: weight decay multiplies the weight by ``1 - lr*weight_decay`` instead of changing the gradient.
        maximize: ascend instead of descend.
        grad_scale: one float32 by which the gradients are divided.
        found_inf: one float32. If it is not 0, the step changes and counts nothing.
        norm_squared: one float64, the squared norm of all gradients as they are stored; used with ``max_norm``.
        max_norm: gradients with a larger norm are scaled down to this norm; 0 disables it.
        state_firsts, state_seed: rounded states, see the docstring of this module.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not match.
    """
    sizes = [len(params)] if group_sizes is None else group_sizes
    rates = [lr] if isinstance(lr, (int, float)) else lr
    decays = [weight_decay] if isinstance(weight_decay, (int, float)) else weight_decay
    rule = momentum, dampening, nesterov, decoupled, maximize, grad_scale, found_inf, norm_squared, max_norm
    tensors = params, grads, momentum_buffers, masters, steps, scratch
    _sgd_step(*tensors, sizes, rates, decays, device_lr, *rule, state_firsts, state_seed)


def mix_sgd_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    steps: Sequence[Tensor],
    scratch: Tensor | None,
    mixture: Mixture,
    offsets: Sequence[int],
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
    norm_squared: Tensor | None = None,
    max_norm: float = 0.0,
) -> None:
    """``mix_`` and then ``sgd_step_``, bit for bit, with one read and one write of the weights.

    The gradient is taken at the weights before mixing: average-while-computing, Lian et al. 2017, algorithm 1. Weight
    decay uses the mixed weights, as with any optimizer that steps after mixing. ``mix_adamw_step_``, ``mix_lars_step_``
    and ``mix_lamb_step_`` do the same for their rules; LARS and LAMB average in their first pass.

    All other arguments are those of :func:`ddpcore.ops.sgd_step_`.

    Args:
        params: dense views of one row of weights, without masters.
        mixture: the average with rows of others. Each is one-dimensional, with the dtype of the params. ``out`` is the
            row that receives the result; without it, the params do. At most :data:`MAX_STEP_PEERS` peers on CUDA.
        offsets: the index of each parameter's first element in the row, and so in each row of the mixture. Elements
            between the parameters do not change.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not match, or the params are not in one row.
    """
    sizes = [len(params)] if group_sizes is None else group_sizes
    rates = [lr] if isinstance(lr, (int, float)) else lr
    decays = [weight_decay] if isinstance(weight_decay, (int, float)) else weight_decay
    rule = momentum, dampening, nesterov, decoupled, maximize, norm_squared, max_norm
    mix = mixture_arguments(mixture, offsets)
    _mix_sgd_step(params, grads, momentum_buffers, steps, scratch, sizes, rates, decays, device_lr, *rule, *mix)
