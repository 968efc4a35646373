"""SGD in one pass with averaging: what a fused optimizer offers the engine beside ``step()``."""

from __future__ import annotations

import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.dtypes import KERNEL_DTYPES
from ddpcore.flat import FlatParameters, Segment
from ddpcore.ops import Mixture
from ddpcore.optim.base import FusedOptimizer
from ddpcore.optim.batch import Group

LARGE = 2**16  # elements of a gradient from which a step of its own is cheaper than to copy it into grad_LP first


class MixingOptimizer(FusedOptimizer):
    """A momentum optimizer whose step can average with neighbours in the same pass over the flat buffer.

    Bound to a flat buffer, a group whose parameters are all at the same point is stepped as a few long columns. What
    the one-pass kernel does not know (a scaler, clipping, masters, a learning rate on the device, parameters without a
    gradient) is done one after the other: first the average, then the step.
    """

    _mixture: Mixture | None = None
    _layout: tuple[Segment, ...] | None
    _momentum_LP: Tensor | None
    _spans: dict[tuple[int, ...], list[tuple[int, int, int, int]]]

    def bind(self, flat: FlatParameters) -> None:
        """Step on the flat buffers from now on. The parameters must be views of them."""
        super().bind(flat)
        self._mixture = None
        self._members = {id(parameter) for parameter in flat.parameters}
        self._forget_layout()

    def mix_on_next_step(self, mixture: Mixture) -> None:
        """Make the next ``step()`` an average with neighbours and a step."""
        self._mixture = mixture

    def step_groups(self) -> None:
        """See :class:`FusedOptimizer`."""
        flat, mixture, self._mixture = self._flat, self._mixture, None
        if flat is None:
            self.step_lists(self.param_groups)
            return
        if self._layout is not flat.segments:
            self._forget_layout()  # the buffers of the state are copied into a new momentum_LP
            self._layout = flat.segments
        own = flat.own_grads(LARGE)
        flat.gather_grads(left=own)
        others = [group for group in self.param_groups if not self._is_column(group)]
        num_params = sum(len(group["params"]) for group in self.param_groups)
        if mixture is not None and (others or num_params < len(flat.parameters)):  # a group was taken out: frozen
            flat.mix_(mixture)
            mixture = None
        for group in self.param_groups:
            if not any(group is other for other in others):
                self._step_columns(group, flat, mixture, own)
        if mixture is not None:
            flat.move_to(mixture.out)
        if others:
            self.step_lists(others)

    def _forget_layout(self) -> None:
        self._layout = None
        self._momentum_LP = None
        self._spans = {}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._forget_layout()  # load_state_dict: the parameters stay where they are

    def _is_column(self, group: Group) -> bool:
        """Whether one rule holds for all of the group, and the kernels of flat buffers know it."""
        scaled = getattr(self, "found_inf", None) is not None or getattr(self, "grad_scale", None) is not None
        params = group["params"]
        if scaled or group["max_grad_norm"] is not None or not params:
            return False
        if isinstance(group["lr"], Tensor) or params[0].dtype not in KERNEL_DTYPES:
            return False
        if group["master_weights"] and params[0].dtype != torch.float32:
            return False
        if any(p.grad is None or id(p) not in self._members for p in params):
            return False
        if group["momentum"] == 0:
            return True
        states = [self.state.get(p, {}) for p in params]
        points = [(id(state.get("step")), state.get("momentum_buffer") is None) for state in states]
        return all(point == points[0] for point in points)

    def _step_columns(
        self, group: Group, flat: FlatParameters, mixture: Mixture | None, own: dict[int, Tensor]
    ) -> None:
        momentum_LP, step = self._flat_momentum(group, flat)
        rule = {name: group[name] for name in ("momentum", "dampening", "nesterov", "maximize")}
        rule["decoupled"] = group["decoupled_weight_decay"]
        columns = [
            (b, e, flat.param_LP[:, b:e], grad, None if momentum_LP is None else momentum_LP[:, b:e])
            for b, e, grad in self._pieces_of(group, flat, own)
        ]
        if mixture is None:
            params = [row for _, _, weights, _, _ in columns for row in weights.unbind(0)]
            grads = [row for _, _, _, grad, _ in columns for row in grad.unbind(0)]
            buffers = [row for *_, momentum in columns if momentum is not None for row in momentum.unbind(0)]
            steps, scratch = ([], None) if step is None else ([step], self._scratch)
            weight_decay = group["weight_decay"]
            ops.sgd_step_(params, grads, buffers, [], steps, scratch, lr=group["lr"], weight_decay=weight_decay, **rule)
        else:
            for index, (begin, end, weights, grad, momentum) in enumerate(columns):
                part = mixture.columns(begin, end)
                ops.mix_sgd_step_(
                    weights[0],
                    part.peers,
                    part.self_weight,
                    part.peer_weights,
                    grad[0],
                    None if momentum is None else momentum[0],
                    None if step is None else step if index == len(columns) - 1 else step.clone(),  # counted once
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    noise=part.noise,
                    out=part.out,
                    **rule,
                )
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(group["params"])

    def _flat_momentum(self, group: Group, flat: FlatParameters) -> tuple[Tensor | None, Tensor | None]:
        """The momentum laid out like ``flat``, its views now the state's buffers, and the steps taken."""
        if group["momentum"] == 0:
            return None, None
        if self._momentum_LP is None:
            self._momentum_LP = torch.zeros_like(flat.param_LP)
            self._momentum_views = dict(zip(map(id, flat.parameters), flat.views_of(self._momentum_LP), strict=True))
            self._scratch = torch.zeros(
                2 + flat.param_LP.shape[0] * len(flat.segments), dtype=torch.float64, device=flat.param_LP.device
            )
        fresh: dict[torch.device, Tensor] = {}
        for parameter in group["params"]:
            view = self._momentum_views[id(parameter)]
            state = self.state[parameter]
            buffer = state.get("momentum_buffer")
            if buffer is view:
                continue
            if buffer is not None:
                view.copy_(buffer)  # a state that was loaded, or made before bind()
            state["momentum_buffer"] = view
            if buffer is None or "step" not in state:
                if parameter.device not in fresh:
                    begun = 0.0 if buffer is None else 1.0
                    fresh[parameter.device] = torch.full((1,), begun, device=parameter.device)
                state["step"] = fresh[parameter.device]
        return self._momentum_LP, self.state[group["params"][0]]["step"]

    def _pieces_of(self, group: Group, flat: FlatParameters, own: dict[int, Tensor]) -> list[tuple[int, int, Tensor]]:
        """The columns of a group's parameters, and their gradients ``[L, n]``; neighbours in ``grad_LP`` are joined."""
        members = tuple(id(parameter) for parameter in group["params"])
        if members not in self._spans:  # found anew when the layout changes
            self._spans[members] = _spans(flat, set(members))
        pieces: list[tuple[int, int, Tensor]] = []
        is_open = False  # whether the last piece is of grad_LP
        for index, begin, end, size in self._spans[members]:
            if index in own:
                pieces.append((begin, begin + size, own[index]))
            elif is_open and pieces[-1][1] == begin:
                first = pieces[-1][0]
                pieces[-1] = (first, end, flat.grad_LP[:, first:end])
            else:
                pieces.append((begin, end, flat.grad_LP[:, begin:end]))
            is_open = index not in own
        return pieces


def _spans(flat: FlatParameters, members: set[int]) -> list[tuple[int, int, int, int]]:
    """Of each member its index, its columns with the padding behind them, and its size."""
    ends = [segment.offset for segment in flat.segments[1:]] + [flat.numel]
    return [
        (index, segment.offset, end, segment.numel)
        for index, (parameter, segment, end) in enumerate(zip(flat.parameters, flat.segments, ends, strict=True))
        if id(parameter) in members
    ]
