"""The steps of the optimizers: one table for each rule, and the operators that follow from it.

A table has the arguments of ``<rule>_step_`` with their types and defaults. The operator's schema, its fake kernel, its
Python function and the arguments that an optimizer passes to it follow from the table. The binding in
``csrc/bindings/operators.h`` has the same arguments in the same order.

**Rounded states**, of all steps: ``state_firsts`` is empty, or has for each parameter the index of its first element
among the random numbers, a multiple of 4. Then momentum and moments are bfloat16, and are rounded stochastically by the
random bits of (``state_seed``, step count, index + place of the element in memory). This needs ``steps`` and takes no
masters. SGD and LARS step along the momentum before it is rounded; Adam and LAMB use the moments as they are stored.

**A mix**, of all steps: with ``mixture`` a step is ``mix_`` and then the step, bit for bit, with one read and one write
of the weights. The gradient is taken at the weights before mixing: average-while-computing, Lian et al. 2017, algorithm
1. Weight decay uses the mixed weights, as with any optimizer that steps after mixing. LARS and LAMB average in their
first pass. A mix takes no masters, ``state_firsts``, ``grad_scale``, ``found_inf`` or ``passes``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddpcore.ops import reference
from ddpcore.ops.library import define, no_result, note_writes
from ddpcore.ops.mix import mixture_arguments

REQUIRED: Any = object()


class Argument(NamedTuple):
    """One argument of a step."""

    name: str
    kind: str  # in the notation of torch's schemas; with "!" the step writes into it
    default: Any = REQUIRED
    option: str = ""  # the option of an optimizer's group that has the value; empty: the optimizer computes it
    item: int | None = None  # the place of the value in that option, where it has several
    per_group: bool = False  # a list with one value for each parameter group


_GROUPS = (
    Argument("group_sizes", "int[]", None),
    Argument("lr", "float[]", per_group=True),
    Argument("weight_decay", "float[]", 0.0, per_group=True),
    Argument("device_lr", "Tensor[]", ()),
)
_ADAPT = Argument("adapt", "int[]", per_group=True)
_SCALING = (
    Argument("maximize", "bool", False),
    Argument("grad_scale", "Tensor?", None),
    Argument("found_inf", "Tensor?", None),
    Argument("norm_squared", "Tensor?", None),
    Argument("max_norm", "float", 0.0),
)
_PASSES = (Argument("squares", "Tensor!?", None), Argument("passes", "str", "both"))
_STATES = (Argument("state_firsts", "int[]", ()), Argument("state_seed", "int", 0))
_MIX = (  # of ddpcore.ops.mix.mixture_arguments, in its order
    Argument("peers", "Tensor[]?", None),
    Argument("self_weight", "float", 1.0),
    Argument("peer_weights", "float[]?", None),
    Argument("offsets", "int[]?", None),
    Argument("noise_std", "float", 0.0),
    Argument("noise_seed", "int", 0),
    Argument("noise_step", "int", 0),
    Argument("noise_first", "int", 0),
    Argument("out", "Tensor!?", None),
)


@dataclass(frozen=True)
class Rule:
    """The update rule of an optimizer, as its kernels take it."""

    name: str  #: the operator is ``<name>_step_``
    buffers: tuple[str, ...]  #: the states of a parameter besides its step count and master weight
    options: tuple[Argument, ...]  #: the arguments that only this rule has
    #: the step of a tensor depends on its norms: it has two passes, and a trust ratio for each tensor
    uses_norms: bool = False
    wide_states: bool = False  #: the states are float32 for parameters of all dtypes
    is_counted: bool = True  #: every group needs a step count

    @property
    def operator(self) -> str:
        """The name of the operator."""
        return f"{self.name}_step_"

    @property
    def tensors(self) -> tuple[Argument, ...]:
        """The arguments that a call may give by position."""
        none = REQUIRED if self.is_counted else ()
        return (
            Argument("params", "Tensor![]"),
            Argument("grads", "Tensor[]"),
            *(Argument(f"{name}s", "Tensor![]", none) for name in self.buffers),
            Argument("masters", "Tensor![]", none),
            Argument("steps", "Tensor![]", none),
            Argument("scratch", "Tensor!") if self.is_counted else Argument("scratch", "Tensor!?", None),
            *([Argument("trust", "Tensor!")] if self.uses_norms else []),
        )

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """All arguments of the operator, without the arguments of a mix."""
        adapt, passes = ((_ADAPT,), _PASSES) if self.uses_norms else ((), ())
        return *self.tensors, *_GROUPS, *adapt, *self.options, *_SCALING, *passes, *_STATES

    @property
    def schema(self) -> str:
        """The operator in torch's notation."""
        optional = {*(_PASSES if self.uses_norms else ()), *_STATES, *_MIX}  # torch wants defaults last
        texts: list[str] = []
        for argument in (*self.arguments, *_MIX):
            alias = chr(ord("a") + sum("!" in text for text in texts))  # of a tensor into which the step writes
            text = f"{argument.kind.replace('Tensor!', f'Tensor({alias}!)')} {argument.name}"
            default = "[]" if argument.default == () else repr(argument.default)
            texts.append(f"{text}={default}" if argument in optional else text)
        return f"{self.operator}({', '.join(texts)}) -> ()"

    def options_of(self, group: dict[str, Any]) -> dict[str, Any]:
        """The values of the rule's options in an optimizer's group."""
        named = [(one.name, group[one.option], one.item) for one in self.options if one.option]
        return {name: value if item is None else value[item] for name, value, item in named}


_MOMENTUM = (
    Argument("momentum", "float", 0.0, "momentum"),
    Argument("dampening", "float", 0.0, "dampening"),
    Argument("nesterov", "bool", False, "nesterov"),
    Argument("decoupled", "bool", False, "decoupled_weight_decay"),
)
_MOMENTS = (Argument("beta1", "float", 0.9, "betas", 0), Argument("beta2", "float", 0.999, "betas", 1))
SGD = Rule("sgd", ("momentum_buffer",), _MOMENTUM, is_counted=False)
ADAMW = Rule(
    "adamw",
    ("exp_avg", "exp_avg_sq"),
    (*_MOMENTS, Argument("eps", "float", 1e-8, "eps"), Argument("decoupled", "bool", True, "decoupled_weight_decay")),
    wide_states=True,
)
LARS = Rule(
    "lars",
    ("momentum_buffer",),
    (
        Argument("variant", "str", "you2017", "variant"),
        Argument("trust_coefficient", "float", 0.001, "trust_coefficient"),
        Argument("eps", "float", 1e-8, "eps"),
        _MOMENTUM[0]._replace(default=0.9),
        *_MOMENTUM[1:],
    ),
    uses_norms=True,
)
LAMB = Rule(
    "lamb",
    ("exp_avg", "exp_avg_sq"),
    (
        *_MOMENTS,
        Argument("eps", "float", 1e-6, "eps"),
        Argument("debias", "bool", True),
        Argument("decay_mode", "str", "in_update", "decay_mode"),
        Argument("min_ratio", "float", 0.0),
        Argument("max_ratio", "float", math.inf),
        Argument("min_weight_norm", "float", 0.0),
        Argument("max_weight_norm", "float", math.inf),
    ),
    uses_norms=True,
    wide_states=True,
)
RULES = {rule.name: rule for rule in (SGD, ADAMW, LARS, LAMB)}


_PER_GROUP = "[{0}] * len(group_sizes) if isinstance({0}, (int, float)) else {0}"
_FUNCTION = """
def with_names(operator, mixture_arguments, note_writes, inf):
    def {operator}({parameters}, mixture=None, offsets=()):
        group_sizes = [len(params)] if group_sizes is None else group_sizes
        note_writes("{operator}", params)
        if mixture is None:
            operator({values})
        else:
            operator({values}, *mixture_arguments(mixture, offsets))
    return {operator}
"""


def _function(rule: Rule, documentation: str) -> Callable[..., None]:
    """Define the operator of a rule, and write its Python function.

    The function is text, as in ``namedtuple``: its signature is what the table says, and a call has no overhead, which
    would be microseconds for 31 arguments.
    """
    shown = [a.name if a.default is REQUIRED else f"{a.name}={a.default!r}" for a in rule.arguments]
    num = len(rule.tensors)
    values = (_PER_GROUP.format(a.name) if a.per_group else a.name for a in rule.arguments)
    parameters = ", ".join([*shown[:num], "*", *shown[num:]])
    text = _FUNCTION.format(operator=rule.operator, parameters=parameters, values=", ".join(values))
    found: dict[str, Any] = {}
    exec(text, {"__name__": __name__}, found)
    operator = define(rule.schema, getattr(reference, rule.operator), no_result)
    function: Callable[..., None] = found["with_names"](operator, mixture_arguments, note_writes, math.inf)
    function.__qualname__, function.__doc__ = rule.operator, documentation
    return function


sgd_step_ = _function(
    SGD,
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
        state_firsts, state_seed: rounded states, see the docstring of ``ddpcore.ops.steps``.
        mixture: an average with rows of others, computed in the same pass; see there. The params are then dense views
            of one row of weights. The rows are one-dimensional, with the dtype of the params. ``out`` is the row that
            receives the result; without it, the params do. At most :data:`MAX_STEP_PEERS` peers on CUDA.
        offsets: with a mixture, the index of each parameter's first element in the row, and so in each row of the
            mixture. Elements between the parameters do not change.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not match, or with a mixture the params are not in one row.
        TypeError: an argument is unknown.
    """,
)

adamw_step_ = _function(
    ADAMW,
    """One step of ``torch.optim.AdamW`` or ``Adam`` on every tensor, in place.

    ``m = beta1*m + (1-beta1)*g; v = beta2*v + (1-beta2)*g^2; w -= lr * m_hat/(sqrt(v_hat) + eps)``, with ``m_hat =
    m/(1-beta1^t)`` and ``v_hat = v/(1-beta2^t)`` at step t. It has the bits of ``lamb_step_`` without a ratio.

    All other arguments, and the errors, are as in :func:`ddpcore.ops.sgd_step_`.

    Args:
        exp_avgs, exp_avg_sqs: m and v, float32 (bfloat16 with ``state_firsts``), one per parameter; changed in place.
        steps: one float32 per group: the number of steps taken so far, increased by one.
        scratch: see :func:`new_scratch`; float64 on the parameters' device, zero at first.
        beta1, beta2: decay rates of m and v.
        eps: added to the square root.
        decoupled: weight decay first multiplies w by ``1 - lr*weight_decay`` (AdamW), else it is added to g (Adam).
    """,
)

lars_step_ = _function(
    LARS,
    """One LARS step (You, Gitman, Ginsburg 2017, algorithm 1) on every tensor, in place.

    ``R = trust_coefficient*|w| / (|g| + weight_decay*|w| + eps)`` for each tensor, or 1 if a norm is zero. Decoupled
    weight decay is not part of R.

    - ``you2017``: ``m = momentum*m + lr*R*(g + weight_decay*w); w -= m``
    - ``scaled_grad``: ``m = momentum*m + R*(g + weight_decay*w); w -= lr*m``
    - ``scaled_lr``: ``m = momentum*m + (g + weight_decay*w); w -= lr*R*m``

    All other arguments, and the errors, are as in :func:`ddpcore.ops.sgd_step_`.

    Args:
        trust: float64 ``[len(params), 3]``, overwritten: R, weight norm and gradient norm of each tensor.
        adapt: one per group: 0 sets R to 1.
        variant: ``you2017``, ``scaled_grad`` or ``scaled_lr``, else RuntimeError.
        trust_coefficient: eta in the paper.
        eps: added to the denominator of R.
        squares: float64 ``[len(params), 2]``: sums of squares of weights and gradients. Pass ``first`` writes them and
            ``second`` reads them; between these calls the caller adds the sums of other shards. None with ``both``.
        passes: ``both``, ``first`` or ``second``.
    """,
)

lamb_step_ = _function(
    LAMB,
    """One LAMB step (You et al. 2020, algorithm 2) on every tensor, in place.

    ``m = beta1*m + (1-beta1)*g; v = beta2*v + (1-beta2)*g^2; u = m_hat/(sqrt(v_hat) + eps) + weight_decay*w``, and
    ``w -= lr * phi(|w|)/|u| * u``. The ratio ``phi(|w|)/|u|`` is 1 if a norm is zero; phi clamps ``|w|``.

    All other arguments, and the errors, are as in :func:`ddpcore.ops.sgd_step_`; an unknown mode is a RuntimeError.

    Args:
        exp_avgs, exp_avg_sqs: m and v, as of :func:`ddpcore.ops.adamw_step_`.
        trust, adapt, squares, passes: as of :func:`ddpcore.ops.lars_step_`, with the update in place of the gradient.
        beta1, beta2, eps, debias: as in the equation. Without debias, m_hat is m and v_hat is v.
        decay_mode: ``in_update`` (the paper), ``coupled`` (added to the gradient) or ``decoupled`` (without the ratio).
        min_ratio, max_ratio, min_weight_norm, max_weight_norm: bounds of the ratio and of phi.
    """,
)


# ---- buffers that a step needs besides its tensors: the caller creates them once and keeps them ----


def num_blocks(tensors: Sequence[Tensor]) -> int:
    """The number of blocks into which the kernels cut the tensors. Sums are computed block by block."""
    return sum(-(-tensor.numel() // reference.BLOCK) for tensor in tensors)


def new_scratch(params: Sequence[Tensor]) -> Tensor:
    """Scratch for a step on these parameters: two partial sums per block, then counters that are zero between steps.

    Steps on some of the parameters may use it too, if steps run one after another.
    """
    return torch.zeros(2 * num_blocks(params) + len(params) + 2, dtype=torch.float64, device=params[0].device)


def new_trust(params: Sequence[Tensor]) -> Tensor:
    """``[len(params), 3]`` of NaN. LARS and LAMB write ratio, weight norm and gradient or update norm into it."""
    return torch.full((len(params), 3), math.nan, dtype=torch.float64, device=params[0].device)
