"""FusedSGD: ``torch.optim.SGD`` in one launch for all tensors of a group, and in one pass with gossip averaging."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.flat import FlatParameters, Segment
from ddpcore.ops import Mixture
from ddpcore.optim.base import MixingOptimizer

Group = dict[str, Any]


class FusedSGD(MixingOptimizer):
    """Drop-in for ``torch.optim.SGD`` (momentum as in Sutskever et al. 2013, as torch writes it).

    The state is torch's (``momentum_buffer`` a parameter), so ``state_dict`` goes to and from ``torch.optim.SGD``.

    Args:
        params: parameters or groups, as for any optimizer; float32, bfloat16 or float16, on CPU or CUDA.
        lr: learning rate.
        momentum: 0 keeps no buffer.
        dampening: as in torch; must be 0 with ``nesterov``.
        weight_decay: coupled (L2) decay.
        nesterov: needs momentum.
        maximize: ascend.

    Raises:
        ValueError: a hyperparameter is negative, not a number, or does not fit the others.
        RuntimeError: in ``step``, a sparse gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}: it must be a number of at least 0")
        if not math.isfinite(dampening):
            raise ValueError(f"dampening is {dampening}: it must be a number")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("nesterov needs momentum > 0 and dampening 0")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults)
        self._unbind()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if hasattr(self, "_flat"):
            self._forget_layout()  # load_state_dict: the parameters stay where they are
        else:
            self._unbind()  # a copy has parameters of its own

    def _unbind(self) -> None:
        self._flat: FlatParameters | None = None
        self._mixture: Mixture | None = None
        self._forget_layout()

    def _forget_layout(self) -> None:
        self._layout: tuple[Segment, ...] | None = None
        self._momentum_LP: Tensor | None = None
        self._runs: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def bind(self, flat: FlatParameters) -> None:
        """See :class:`MixingOptimizer`."""
        self._unbind()
        self._flat = flat
        self._members = {id(parameter) for parameter in flat.parameters}

    def mix_on_next_step(self, mixture: Mixture) -> None:
        """See :class:`MixingOptimizer`."""
        self._mixture = mixture

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` returns, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._flat is not None and self._layout is not self._flat.segments:
            self._forget_layout()  # the buffers of the state are copied into a new momentum_LP
            self._layout = self._flat.segments
        for group in self.param_groups:
            if self._flat is not None and self._is_uniform(group):
                self._step_flat(group, self._flat)
                continue
            if self._flat is not None and self._mixture is not None:
                self._mix_only(group, self._flat, self._mixture)
            self._step_list(group)
        self._mixture = None
        if not torch.compiler.is_compiling():  # autograd must know, to refuse a graph that needs the old weights
            moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            torch.autograd.graph.increment_version(moved)
        return loss

    def _step_list(self, group: Group) -> None:
        # One launch for all tensors of a dtype and device that are at their first step, one for all others.
        alike: dict[tuple[torch.dtype, torch.device, bool], list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise RuntimeError("FusedSGD takes dense gradients only: use torch.optim.SGD for sparse ones")
            first_step = group["momentum"] != 0 and not self._has_momentum(parameter)
            alike.setdefault((parameter.dtype, parameter.device, first_step), []).append(parameter)
        for (_, _, first_step), parameters in alike.items():
            gradients = [_like(p.grad, p) for p in parameters if p.grad is not None]
            buffers = []
            for parameter in parameters if group["momentum"] != 0 else ():
                state = self.state[parameter]
                buffer = torch.zeros_like(parameter) if first_step else _like(state["momentum_buffer"], parameter)
                state["momentum_buffer"] = buffer
                buffers.append(buffer)
            stacked = (
                self._flat is not None and self._flat.stack is not None
            )  # rows of a stack are dense, stacks are not
            lists = [_rows(tensors) if stacked else tensors for tensors in (parameters, gradients, buffers)]
            ops.sgd_step_(*lists, **_rule(group), first_step=first_step)

    def _is_uniform(self, group: Group) -> bool:
        """Whether one rule holds for all of the group: all have gradients, and all have momentum or none has."""
        if any(p.grad is None or id(p) not in self._members for p in group["params"]):
            return False
        started = {self._has_momentum(parameter) for parameter in group["params"]}
        return group["momentum"] == 0 or len(started) == 1

    def _has_momentum(self, parameter: Tensor) -> bool:
        return parameter in self.state and self.state[parameter].get("momentum_buffer") is not None

    def _step_flat(self, group: Group, flat: FlatParameters) -> None:
        flat.gather_grads()
        momentum_LP, first_step = self._flat_momentum(group, flat)
        rule = _rule(group)
        for begin, end in self._runs_of(group, flat):
            weights, grad = flat.param_LP[:, begin:end], flat.grad_LP[:, begin:end]
            momentum = None if momentum_LP is None else momentum_LP[:, begin:end]
            if self._mixture is not None:
                ops.mix_sgd_step_(
                    weights[0],
                    [peer[begin:end] for peer in self._mixture.peers],
                    self._mixture.self_weight,
                    self._mixture.peer_weights,
                    grad[0],
                    None if momentum is None else momentum[0],
                    **rule,
                    first_step=first_step,
                )
            else:
                buffers = [] if momentum is None else momentum.unbind(0)
                ops.sgd_step_(weights.unbind(0), grad.unbind(0), buffers, **rule, first_step=first_step)

    def _mix_only(self, group: Group, flat: FlatParameters, mixture: Mixture) -> None:
        for begin, end in self._runs_of(group, flat):
            peers = [peer[begin:end] for peer in mixture.peers]
            ops.mix_(flat.param_LP[0, begin:end], peers, mixture.self_weight, mixture.peer_weights)

    def _flat_momentum(self, group: Group, flat: FlatParameters) -> tuple[Tensor | None, bool]:
        """The momentum laid out like ``flat``, its views now the state's buffers, and whether it is still empty."""
        if group["momentum"] == 0:
            return None, False
        if self._momentum_LP is None:
            self._momentum_LP = torch.zeros_like(flat.param_LP)
            self._momentum_views = dict(zip(map(id, flat.parameters), flat.views_of(self._momentum_LP), strict=True))
        first_step = False
        for parameter in group["params"]:
            view = self._momentum_views[id(parameter)]
            state = self.state[parameter]
            buffer = state.get("momentum_buffer")
            if buffer is view:
                continue
            if buffer is None:
                first_step = True  # of all: the group is uniform
            else:
                view.copy_(buffer)  # a state that was loaded, or made before bind()
            state["momentum_buffer"] = view
        return self._momentum_LP, first_step

    def _runs_of(self, group: Group, flat: FlatParameters) -> list[tuple[int, int]]:
        """The columns of a group's parameters, neighbours joined; found anew when the layout changes."""
        members = tuple(id(parameter) for parameter in group["params"])
        if members not in self._runs:
            self._runs[members] = _runs(flat, set(members))
        return self._runs[members]


def _rule(group: Group) -> dict[str, Any]:
    names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
    rule = {name: group[name] for name in names}
    rule["lr"] = float(rule["lr"])
    return rule


def _like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient, or a buffer, with the strides of its parameter."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _rows(stacks: Sequence[Tensor]) -> list[Tensor]:
    return [row for stack in stacks for row in stack.unbind(0)]


def _runs(flat: FlatParameters, members: set[int]) -> list[tuple[int, int]]:
    """Columns of the members, neighbours joined, the padding behind a parameter included."""
    runs: list[tuple[int, int]] = []
    ends = [segment.offset for segment in flat.segments[1:]] + [flat.numel]
    for parameter, segment, end in zip(flat.parameters, flat.segments, ends, strict=True):
        if id(parameter) not in members:
            continue
        if runs and runs[-1][1] == segment.offset:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((segment.offset, end))
    return runs
