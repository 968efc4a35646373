"""FusedLARS: momentum SGD whose step is scaled, tensor by tensor, to the size of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ddpcore.optim.batch import Batch, Group, State
from ddpcore.optim.checks import check_accepted, check_choice, check_common, check_momentum, check_number
from ddpcore.optim.trust import AdaptiveOptimizer, TrustRatio

VARIANTS = ("you2017", "scaled_grad", "scaled_lr")


class FusedLARS(AdaptiveOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, arXiv:1708.03888).

    With ``R = trust_coefficient*|w| / (|g| + weight_decay*|w| + eps)`` for each tensor, 1 where a norm is zero:

    - ``you2017`` (the paper, algorithm 1): ``m = momentum*m + lr*R*(g + weight_decay*w); w -= m``
    - ``scaled_grad`` (LARC, timm, torch-optimizer): ``m = momentum*m + R*(g + weight_decay*w); w -= lr*m``
    - ``scaled_lr`` (Intel's extension): ``m = momentum*m + (g + weight_decay*w); w -= lr*R*m``

    They agree while learning rate and ratios are constant. ``docs/optimizers.md`` compares them with other libraries.

    Args:
        params: parameters, named parameters or groups. A group may set ``always_adapt=False``: its tensors then take
            plain SGD steps with ``lr``; :func:`ddpcore.optim.param_groups` does that for biases and norms.
        lr: learning rate; a number or a tensor.
        momentum: 0 keeps no buffer.
        dampening: as in SGD; must be 0 with ``nesterov``.
        weight_decay: coupled (L2) decay, part of R.
        nesterov: step along ``d + momentum*m``.
        trust_coefficient: eta in the paper.
        eps: added to the denominator of R.
        variant: where lr and R act, see above.
        always_adapt: whether tensors have a ratio; per group.
        maximize: ascend.
        foreach: taken for torch's sake; there is one implementation.
        differentiable: must be False.
        fused: as ``foreach``.
        capturable: as ``foreach``: every step can be captured in a CUDA graph.
        decoupled_weight_decay: decay multiplies the weight by ``1 - lr*weight_decay`` and is no part of R.
        max_grad_norm: see :class:`FusedSGD`; R is formed of the clipped gradient.
        master_weights: see :class:`FusedSGD`.

    Raises:
        ValueError: a hyperparameter is negative, not a number, unknown, or does not fit the others; no parameters.
        RuntimeError: in ``step``, a sparse gradient.
    """

    shared_options = (
        "momentum",
        "dampening",
        "nesterov",
        "decoupled_weight_decay",
        "maximize",
        "master_weights",
        "variant",
        "trust_coefficient",
        "eps",
    )

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
    ) -> None:
        check_accepted(differentiable)
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "trust_coefficient": trust_coefficient,
                "eps": eps,
                "variant": variant,
                "always_adapt": always_adapt,
                "maximize": maximize,
                "decoupled_weight_decay": decoupled_weight_decay,
                "max_grad_norm": max_grad_norm,
                "master_weights": master_weights,
            },
        )

    def check_group(self, group: Group) -> None:
        """See :class:`FusedOptimizer`."""
        check_common(group)
        check_momentum(group)
        check_number("trust_coefficient", group["trust_coefficient"])
        check_number("eps", group["eps"])
        check_choice("variant", group["variant"], VARIANTS)
        check_choice("always_adapt", group["always_adapt"], (True, False))

    def state_names(self, group: Group) -> tuple[str, ...]:
        """See :class:`FusedOptimizer`."""
        return self.buffers if group["momentum"] != 0 else ()

    def check_saved(self, state_dict: dict[str, Any]) -> None:
        """See :class:`FusedOptimizer`. Momentum of ``torch.optim.SGD`` is that of one variant alone."""
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            states = [state_dict["state"].get(index, {}) for index in saved["params"]]
            if "variant" not in saved and own["variant"] != "scaled_lr" and any("momentum_buffer" in s for s in states):
                raise ValueError(
                    f"state_dict: it is of momentum SGD, which is variant 'scaled_lr' and not {own['variant']!r}: load "
                    f"it into that, take a step, and convert({own['variant']!r})"
                )

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
        has_momentum = options["momentum"] != 0
        buffers = [state["momentum_buffer"] for state in states] if has_momentum else []
        batch.kernels.lars_step_(
            self.rows(params),
            self.rows(grads),
            self.rows(buffers),
            self.rows([state["master"] for state in states]) if batch.masters else [],
            batch.steps,
            batch.scratch,
            batch.trust,
            adapt=[int(group["always_adapt"]) for group in groups],
            variant=options["variant"],
            trust_coefficient=options["trust_coefficient"],
            eps=options["eps"],
            momentum=options["momentum"],
            dampening=options["dampening"],
            nesterov=options["nesterov"],
            decoupled=options["decoupled_weight_decay"],
            **common,
        )

    @torch.no_grad()
    def convert(self, variant: str) -> None:
        """Go on as another variant: the momentum is rescaled, so that the step it causes stays as long as it was.

        The buffers hold ``lr*R*d`` (you2017), ``R*d`` (scaled_grad) or ``d`` (scaled_lr), so they differ by these
        factors. R is that of the last step, lr the one that is set now: exact while both are constant.

        Raises:
            ValueError: the variant is unknown, or momentum was kept but there is no step with a ratio, or a factor is
                zero or no number. Nothing is changed then.
        """
        check_choice("variant", variant, VARIANTS)
        ratios = self.trust_ratios()
        factors: list[tuple[Tensor, float]] = []
        for (name, param), group in self.named_parameters():
            buffer = self.state.get(param, {}).get("momentum_buffer")
            if buffer is None or variant == group["variant"]:
                continue
            if name not in ratios:
                raise ValueError(
                    f"parameter {name} has momentum and no ratio of the last step: convert after a step in which it "
                    "has a gradient, or delete its state"
                )
            rows, lr = ratios[name], float(group["lr"])
            one = isinstance(rows, TrustRatio)
            for part, row in zip([buffer] if one else buffer.unbind(0), [rows] if one else rows, strict=True):
                assert isinstance(row, TrustRatio)
                old, new = _held(group["variant"], lr, row.ratio), _held(variant, lr, row.ratio)
                if not (0 < old < math.inf and 0 < new < math.inf):
                    raise ValueError(
                        f"parameter {name} had ratio {row.ratio} and has lr {lr}: its momentum cannot be converted"
                    )
                factors.append((part, new / old))
        for part, factor in factors:
            part.mul_(factor)
        for group in self.param_groups:
            group["variant"] = variant
        self.defaults["variant"] = variant


def _held(variant: str, lr: float, ratio: float) -> float:
    """By what the momentum of a variant is larger than SGD's."""
    return {"you2017": lr * ratio, "scaled_grad": ratio, "scaled_lr": 1.0}[variant]
