"""FusedSGD: ``torch.optim.SGD`` in one launch for all tensors, and in one pass with gossip averaging."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ddpcore import ops
from ddpcore.optim.base import FusedOptimizer
from ddpcore.optim.batch import Batch, Group, State
from ddpcore.optim.checks import check_accepted, check_common, check_momentum
from ddpcore.optim.weight_step import ColumnRule


class FusedSGD(FusedOptimizer):
    """Drop-in for ``torch.optim.SGD`` (momentum as in Sutskever et al. 2013, as torch writes it).

    ``d = g + weight_decay*w; m = momentum*m + (1-dampening)*d; w -= lr*(d + momentum*m if nesterov else m)``

    The state is torch's (``momentum_buffer`` a parameter), so ``state_dict`` goes to and from ``torch.optim.SGD``.

    Args:
        params: parameters, named parameters or groups, as for any optimizer.
        lr: learning rate; a number or a tensor.
        momentum: 0 keeps no buffer.
        dampening: share of the direction that does not enter the momentum; must be 0 with ``nesterov``.
        weight_decay: coupled (L2) decay.
        nesterov: needs momentum.
        maximize: ascend.
        foreach: taken for torch's sake; there is one implementation.
        differentiable: must be False.
        fused: as ``foreach``.
        decoupled_weight_decay: decay multiplies the weight by ``1 - lr*weight_decay`` (SGDW, Loshchilov and Hutter
            2019) instead of joining the gradient.
        max_grad_norm: gradients of a longer norm, over all parameters, count as if they were this long, as after
            ``torch.nn.utils.clip_grad_norm_``; ``.grad`` is not changed.
        master_weights: keep fp32 weights and momentum behind bfloat16 and float16 parameters.

    Raises:
        ValueError: a hyperparameter is negative, not a number, or does not fit the others; no parameters.
        RuntimeError: in ``step``, a sparse gradient.
    """

    shared_options = ("momentum", "dampening", "nesterov", "decoupled_weight_decay", "maximize", "master_weights")

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

    def state_names(self, group: Group) -> tuple[str, ...]:
        """See :class:`FusedOptimizer`."""
        return self.buffers if group["momentum"] != 0 else ()

    def column_rule(self, group: Group) -> ColumnRule:
        """See :class:`FusedOptimizer`: one kernel averages and steps."""
        scalars = {
            name: group[name] for name in ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize")
        }
        scalars["decoupled"] = group["decoupled_weight_decay"]
        return ColumnRule(
            states=self.state_names(group), step=ops.sgd_step_, mix_step=ops.mix_sgd_step_, scalars=scalars
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
        batch.kernels.sgd_step_(
            self.rows(params),
            self.rows(grads),
            self.rows(buffers),
            self.rows([state["master"] for state in states]) if batch.masters else [],
            batch.steps,
            batch.scratch,
            momentum=options["momentum"],
            dampening=options["dampening"],
            nesterov=options["nesterov"],
            decoupled=options["decoupled_weight_decay"],
            **common,
        )
