"""FusedSGD: ``torch.optim.SGD`` in one launch for all tensors."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddpcore.ops import Rule
from ddpcore.ops.steps import SGD
from ddpcore.optim.base import FusedOptimizer


class FusedSGD(FusedOptimizer):
    """Drop-in for ``torch.optim.SGD`` (momentum of Sutskever et al. 2013, in torch's form).

    ``d = g + weight_decay*w; m = momentum*m + (1-dampening)*d; w -= lr*(d + momentum*m if nesterov else m)``

    The state is torch's (one ``momentum_buffer`` per parameter), so a ``state_dict`` can be exchanged with
    ``torch.optim.SGD`` in both directions.

    Args:
        params: parameters, named parameters or groups, as for any optimizer.
        lr: learning rate; a number or a tensor.
        momentum: 0 keeps no buffer.
        dampening: the share of the direction that does not enter the momentum; must be 0 with ``nesterov``.
        weight_decay: coupled (L2) decay.
        nesterov: step along ``d + momentum*m``; needs momentum.
        maximize: ascend instead of descend.
        differentiable: must be False.
        foreach, fused: accepted as in torch, and ignored.
        decoupled_weight_decay: decay multiplies the weight by ``1 - lr*weight_decay`` (SGDW, Loshchilov and Hutter
            2019) instead of being added to the gradient.
        max_grad_norm: if the norm of all gradients together is larger, the step uses gradients scaled down to this
            norm, as after ``torch.nn.utils.clip_grad_norm_``; ``.grad`` does not change.
        master_weights: keep fp32 weights and momentum for bfloat16 and float16 parameters.
        state_dtype: ``torch.bfloat16`` (or its name) stores momentum and moments in bfloat16, rounded stochastically.
            It takes no parameters with master weights. ``torch.float32``: as the other options say.

    Raises:
        ValueError: a hyperparameter is negative, not a number, unknown, out of its range, or does not fit the others;
            there are no parameters.
        RuntimeError: in ``step``, a gradient is sparse.
    """

    rule: ClassVar[Rule] = SGD

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        state_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        super().__init__(params, dict(locals()))
