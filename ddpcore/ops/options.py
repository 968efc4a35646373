"""Arguments that several steps share: their part of the schema, and their types and meaning for Python callers."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

GROUP_SCHEMA = "int[] group_sizes, float[] lr, float[] weight_decay, Tensor[] device_lr"
MOMENTUM_SCHEMA = "float dampening=0.0, bool nesterov=False, bool decoupled=False"
SCALING_SCHEMA = "Tensor? grad_scale=None, Tensor? found_inf=None, Tensor? norm_squared=None, float max_norm=0.0"


class MomentumOptions(TypedDict, total=False):
    """Options of steps with momentum.

    Attributes:
        momentum: factor of the momentum buffer; 0 is plain SGD and uses no buffer.
        dampening: the share of the direction that does not enter the momentum buffer. Default: 0.
        nesterov: step along ``d + momentum*m`` instead of ``m``. Default: False.
        decoupled: weight decay multiplies the weight by ``1 - lr*weight_decay`` instead of being added to the gradient.
            Default: False.
        maximize: ascend instead of descend. Default: False.
    """

    momentum: float
    dampening: float
    nesterov: bool
    decoupled: bool
    maximize: bool


class ScalingOptions(TypedDict, total=False):
    """Options that scale the gradients before a step uses them. Each defaults to no scaling.

    Attributes:
        grad_scale: one float32: the gradients are divided by it.
        found_inf: one float32: if it is not 0, the step changes and counts nothing.
        norm_squared: one float64: the squared norm of all gradients as they are stored, used with ``max_norm``.
        max_norm: gradients with a larger norm are scaled down to this norm; 0 disables it.
    """

    grad_scale: Tensor | None
    found_inf: Tensor | None
    norm_squared: Tensor | None
    max_norm: float
