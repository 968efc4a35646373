"""FusedLAMB: Adam whose step is scaled, tensor by tensor, to the size of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ddpcore.optim.batch import Batch, Group, State
from ddpcore.optim.checks import check_accepted, check_choice, check_common, check_number, is_number
from ddpcore.optim.trust import AdaptiveOptimizer

VARIANTS = ("paper", "nvlamb", "undebiased")
DECAY_MODES = ("in_update", "coupled", "decoupled")

Clip = float | tuple[float, float] | None


class FusedLAMB(AdaptiveOptimizer):
    """Layer-wise adaptive moments for batch training (You et al. 2020, arXiv:1904.00962, algorithm 2).

    ``m = b1*m + (1-b1)*g; v = b2*v + (1-b2)*g^2; u = m_hat/(sqrt(v_hat) + eps) + weight_decay*w``, and for each tensor
    ``w -= lr * r * u`` with ``r = phi(|w|)/|u|``, 1 where a norm is zero.

    - ``paper``: as above.
    - ``nvlamb`` (apex with ``use_nvlamb``): the same, and tensors without decay are adapted as well.
    - ``undebiased`` (torch-optimizer's default, the paper's last version): m and v as they are, not divided by
      ``1 - beta^step``. Tensors without decay are adapted as well.

    ``docs/optimizers.md`` compares them with other libraries. Both moments are fp32 whatever the parameter is.

    Args:
        params: parameters, named parameters or groups.
        lr: learning rate; a number or a tensor.
        betas: decay of m and v, each in [0, 1).
        eps: added to the root.
        weight_decay: see ``decay_mode``.
        trust_clip: upper bound of r, or (lower, upper).
        max_grad_norm: gradients of a longer norm, over all parameters, count as if they were this long, as after
            ``torch.nn.utils.clip_grad_norm_``; ``.grad`` is not changed. (apex: 1.0.)
        variant: see above.
        always_adapt: whether tensors of groups without weight decay have a ratio. None: in ``paper`` only if no group
            decays, else always. (Where some groups decay, those that do not are biases and norms, which the authors
            leave unadapted.) May differ by group.
        weight_norm_clip: phi: upper bound of ``|w|`` in r, or (lower, upper). None: the identity.
        decay_mode: ``in_update`` (the paper: decay is part of u), ``coupled`` (L2: decay joins the gradient) or
            ``decoupled`` (AdamW: ``w *= 1 - lr*weight_decay``, outside of r).
        maximize: ascend.
        foreach: taken for torch's sake; there is one implementation.
        differentiable: must be False.
        fused: as ``foreach``.
        capturable: as ``foreach``: every step can be captured in a CUDA graph.
        master_weights: keep fp32 weights behind bfloat16 and float16 parameters.

    Raises:
        ValueError: a hyperparameter is negative, not a number, out of its range or unknown; no parameters.
        RuntimeError: in ``step``, a sparse gradient.
    """

    shared_options = (
        "betas",
        "eps",
        "trust_clip",
        "weight_norm_clip",
        "variant",
        "decay_mode",
        "maximize",
        "master_weights",
    )
    buffers = ("exp_avg", "exp_avg_sq")
    float_states = ("master", *buffers)

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
    ) -> None:
        check_accepted(differentiable)
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "trust_clip": trust_clip,
                "max_grad_norm": max_grad_norm,
                "variant": variant,
                "always_adapt": always_adapt,
                "weight_norm_clip": weight_norm_clip,
                "decay_mode": decay_mode,
                "maximize": maximize,
                "master_weights": master_weights,
            },
        )

    def check_group(self, group: Group) -> None:
        """See :class:`FusedOptimizer`."""
        check_common(group)
        if not isinstance(group["betas"], Sequence) or len(group["betas"]) != 2:
            raise ValueError(f"betas is {group['betas']}: it must be two numbers")
        for index, beta in enumerate(group["betas"]):
            check_number(f"betas[{index}]", beta, below=1.0)
        check_number("eps", group["eps"])
        check_choice("variant", group["variant"], VARIANTS)
        check_choice("decay_mode", group["decay_mode"], DECAY_MODES)
        check_choice("always_adapt", group["always_adapt"], (True, False, None))
        for name in ("trust_clip", "weight_norm_clip"):
            if not _is_clip(group[name]):
                raise ValueError(f"{name} is {group[name]}: it must be a number above 0, or (lower, upper)")

    def state_names(self, group: Group) -> tuple[str, ...]:
        """See :class:`FusedOptimizer`."""
        return self.buffers

    def run(
        self,
        batch: Batch,
        groups: list[Group],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[State],
        common: dict[str, Any],
    ) -> None:
        """See :class:`FusedOptimizer`."""
        options = groups[0]
        min_ratio, max_ratio = _bounds(options["trust_clip"])
        min_weight_norm, max_weight_norm = _bounds(options["weight_norm_clip"])
        batch.kernels.lamb_step_(
            self.rows(params),
            self.rows(grads),
            self.rows([state["exp_avg"] for state in states]),
            self.rows([state["exp_avg_sq"] for state in states]),
            self.rows([state["master"] for state in states]) if batch.masters else [],
            batch.steps,
            batch.scratch,
            batch.trust,
            adapt=self._adapted(groups),
            beta1=options["betas"][0],
            beta2=options["betas"][1],
            eps=options["eps"],
            debias=options["variant"] != "undebiased",
            decay_mode=options["decay_mode"],
            min_ratio=min_ratio,
            max_ratio=max_ratio,
            min_weight_norm=min_weight_norm,
            max_weight_norm=max_weight_norm,
            **common,
        )

    def _adapted(self, groups: list[Group]) -> list[int]:
        some_decay = any(group["weight_decay"] != 0 for group in self.param_groups)
        return [int(_adapts(group, some_decay)) for group in groups]


def _adapts(group: Group, some_decay: bool) -> bool:
    if group["weight_decay"] != 0:
        return True
    if group["always_adapt"] is not None:
        return bool(group["always_adapt"])
    return group["variant"] != "paper" or not some_decay


def _is_clip(clip: Any) -> bool:
    if clip is None or is_number(clip):
        return clip is None or clip > 0
    if not isinstance(clip, Sequence) or len(clip) != 2 or not all(is_number(bound) for bound in clip):
        return False
    return 0 <= clip[0] <= clip[1] and clip[0] < math.inf and clip[1] > 0


def _bounds(clip: Clip) -> tuple[float, float]:
    if clip is None:
        return 0.0, math.inf
    return (float(clip[0]), float(clip[1])) if isinstance(clip, Sequence) else (0.0, float(clip))
