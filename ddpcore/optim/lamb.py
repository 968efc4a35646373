"""FusedLAMB: Adam with a step size per tensor that is proportional to the norm of the weights."""

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.ops import Rule
from ddpcore.ops.steps import LAMB
from ddpcore.optim.base import AdaptiveOptimizer
from ddpcore.optim.batch import Batch
from ddpcore.optim.checks import Group, check_flag
from ddpcore.options.typed import check_choice

VARIANTS = ("paper", "nvlamb", "undebiased")
DECAY_MODES = ("in_update", "coupled", "decoupled")

Clip = float | tuple[float, float] | None


class FusedLAMB(AdaptiveOptimizer):
    """Layer-wise adaptive moments for batch training (You et al. 2020, arXiv:1904.00962, algorithm 2).

    ``m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g^2; u = m_hat/(sqrt(v_hat) + eps) + weight_decay*w``, and for each tensor
    ``w -= lr * r * u`` with ``r = phi(|w|)/|u|``, or 1 if a norm is zero.

    - ``paper``: the equations above.
    - ``nvlamb`` (apex with ``use_nvlamb``): the same, and tensors without weight decay have a ratio too.
    - ``undebiased`` (the default of torch-optimizer and the paper's last version): m and v are not divided by
      ``1 - beta^step``, and tensors without weight decay have a ratio too.

    ``docs/optimizers.md`` compares them with other libraries. Both moments are fp32 for parameters of all dtypes,
    unless ``state_dtype`` is bfloat16.

    All other arguments, and the errors, are as in :class:`FusedAdamW`.

    Args:
        weight_decay: see ``decay_mode``.
        trust_clip: upper bound of r, or (lower, upper).
        variant: see above.
        always_adapt: whether tensors of a group without weight decay have a ratio; may differ by group. None: always,
            except in ``paper`` if another group has weight decay. (Tensors without decay are then biases and norms,
            for which the authors use no ratio.)
        weight_norm_clip: phi: upper bound of ``|w|`` in r, or (lower, upper). None: the identity.
        decay_mode: ``in_update`` (the paper: decay is part of u), ``coupled`` (L2: decay is added to the gradient) or
            ``decoupled`` (AdamW: ``w *= 1 - lr*weight_decay``, not scaled by r).
    """

    rule: ClassVar[Rule] = LAMB

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        trust_clip: Clip = None,
        max_grad_norm: float | None = None,
        variant: str = "paper",
        always_adapt: bool | None = None,
        weight_norm_clip: Clip = None,
        decay_mode: str = "in_update",
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        capturable: bool = False,
        master_weights: bool = False,
        state_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        super().__init__(params, dict(locals()))

    @override
    def check_group(self, group: Group) -> None:
        super().check_group(group)
        check_choice("variant", group["variant"], VARIANTS)
        check_choice("decay_mode", group["decay_mode"], DECAY_MODES)
        if group["always_adapt"] is not None:
            check_flag("always_adapt", group["always_adapt"])
        for name in ("trust_clip", "weight_norm_clip"):
            bounds = _bounds(group[name])
            is_valid = len(bounds) == 2 and all(isinstance(one, Real) for one in bounds) and 0 <= bounds[0] <= bounds[1]
            if not is_valid or bounds[0] == math.inf or bounds[1] == 0:
                raise ValueError(f"{name} is {group[name]}: it must be a number above 0, or (lower, upper)")

    @override
    def arguments(self, batch: Batch | None, groups: list[Group]) -> dict[str, Any]:
        assert batch is not None
        options = groups[0]
        min_ratio, max_ratio = _bounds(options["trust_clip"])
        min_weight_norm, max_weight_norm = _bounds(options["weight_norm_clip"])
        return {
            "trust": batch.trust,
            "adapt": [int(self._adapts(group)) for group in groups],
            **super().arguments(batch, groups),
            "debias": options["variant"] != "undebiased",
            "min_ratio": min_ratio,
            "max_ratio": max_ratio,
            "min_weight_norm": min_weight_norm,
            "max_weight_norm": max_weight_norm,
        }

    def _adapts(self, group: Group) -> bool:
        if group["weight_decay"] != 0:
            return True
        if group["always_adapt"] is not None:
            return bool(group["always_adapt"])
        return group["variant"] != "paper" or all(other["weight_decay"] == 0 for other in self.param_groups)


def _bounds(clip: Clip) -> Sequence[float]:
    if clip is None:
        return 0.0, math.inf
    return clip if isinstance(clip, Sequence) else (0.0, clip)
