"""FusedLARS: momentum SGD with a step size per tensor that is proportional to the norm of the weights."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.ops import Rule
from ddpcore.ops.steps import LARS
from ddpcore.optim.base import AdaptiveOptimizer
from ddpcore.optim.batch import Batch
from ddpcore.optim.checks import Group, check_flag, check_number
from ddpcore.options.typed import check_choice

VARIANTS = ("you2017", "scaled_grad", "scaled_lr")


class FusedLARS(AdaptiveOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, arXiv:1708.03888).

    ``R = trust_coefficient*|w| / (|g| + weight_decay*|w| + eps)`` for each tensor, or 1 if a norm is zero.

    - ``you2017`` (the paper, algorithm 1): ``m = momentum*m + lr*R*(g + weight_decay*w); w -= m``
    - ``scaled_grad`` (LARC, timm, torch-optimizer): ``m = momentum*m + R*(g + weight_decay*w); w -= lr*m``
    - ``scaled_lr`` (Intel's extension): ``m = momentum*m + (g + weight_decay*w); w -= lr*R*m``

    They are equal while the learning rate and all ratios are constant. ``docs/optimizers.md`` compares them with other
    libraries. All other arguments, and the errors, are as in :class:`FusedSGD`.

    Args:
        params: parameters, named parameters or groups. A group may set ``always_adapt=False``: its tensors then take
            plain SGD steps with ``lr``. :func:`ddpcore.optim.param_groups` does that for biases and norms.
        weight_decay: coupled (L2) decay, part of R.
        trust_coefficient: eta in the paper.
        eps: added to the denominator of R.
        variant: where lr and R enter, see above.
        always_adapt: whether tensors have a ratio; per group.
        capturable: accepted and ignored: a CUDA graph can capture every step.
        decoupled_weight_decay: decay multiplies the weight by ``1 - lr*weight_decay`` and is not part of R.
        max_grad_norm: R uses the clipped gradient.
    """

    rule: ClassVar[Rule] = LARS

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        variant: str = "you2017",
        always_adapt: bool = True,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        capturable: bool = False,
        decoupled_weight_decay: bool = False,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        state_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        super().__init__(params, dict(locals()))

    @override
    def check_group(self, group: Group) -> None:
        super().check_group(group)
        check_number("trust_coefficient", group["trust_coefficient"])
        check_number("eps", group["eps"])
        check_choice("variant", group["variant"], VARIANTS)
        check_flag("always_adapt", group["always_adapt"])

    @override
    def arguments(self, batch: Batch | None, groups: list[Group]) -> dict[str, Any]:
        assert batch is not None
        adapt = [int(group["always_adapt"]) for group in groups]
        return {"trust": batch.trust, "adapt": adapt, **super().arguments(batch, groups)}
