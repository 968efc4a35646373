"""FusedAdamW: ``torch.optim.AdamW`` and ``Adam`` in one launch for all tensors."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.ops import Rule
from ddpcore.ops.steps import ADAMW
from ddpcore.optim.base import FusedOptimizer
from ddpcore.optim.checks import Group, check_flag


class FusedAdamW(FusedOptimizer):
    """Drop-in for ``torch.optim.AdamW`` (Loshchilov and Hutter 2019) and ``torch.optim.Adam`` (Kingma and Ba 2015).

    ``m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g^2; w = (1 - lr*weight_decay)*w - lr * m_hat/(sqrt(v_hat) + eps)``, with
    ``m_hat = m/(1-b1^t)`` and ``v_hat = v/(1-b2^t)`` at step t of the parameter.

    The state is torch's (``exp_avg``, ``exp_avg_sq`` and ``step``), so a ``state_dict`` can be exchanged with
    ``torch.optim.AdamW`` and ``Adam`` in both directions. Both moments are fp32 for parameters of all dtypes, unless
    ``state_dtype`` is bfloat16.

    All other arguments, and the errors, are as in :class:`FusedSGD`.

    Args:
        betas: decay rates of m and v, each in [0, 1).
        eps: added to the square root.
        weight_decay: see ``decoupled_weight_decay``.
        amsgrad: must be False, else ValueError: no kernel keeps the maximum of v.
        capturable: accepted and ignored: a CUDA graph can capture every step.
        decoupled_weight_decay: decay multiplies the weight by ``1 - lr*weight_decay`` (AdamW). False: it is added to
            the gradient, as in ``torch.optim.Adam``, whose ``weight_decay`` is 0 by default.
        master_weights: keep fp32 weights for bfloat16 and float16 parameters.
    """

    rule: ClassVar[Rule] = ADAMW

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = True,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        state_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        super().__init__(params, dict(locals()))

    @override
    def check_group(self, group: Group) -> None:
        super().check_group(group)
        check_flag("decoupled_weight_decay", group["decoupled_weight_decay"])
        if group["amsgrad"]:
            raise ValueError("amsgrad is True: no kernel keeps the maximum of v; take torch.optim.AdamW(amsgrad=True)")
