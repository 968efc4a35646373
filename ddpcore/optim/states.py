"""The states of parameters: their creation, shared step counters, and their restoration from a file."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ddpcore.ops.dtypes import is_narrow, wide
from ddpcore.optim.batch import Group, State
from ddpcore.optim.rounding import is_rounded


class Stateful(Protocol):
    """The parts of an optimizer that this module uses."""

    state: Any
    param_groups: Any
    float_states: ClassVar[tuple[str, ...]]

    def state_names(self, group: Group) -> tuple[str, ...]:
        """The buffers that each parameter of the group has."""


def has_master(group: Group, param: Tensor) -> bool:
    """Whether the group keeps fp32 weights for this parameter."""
    return bool(group["master_weights"]) and is_narrow(param.dtype)


def create_states(
    optimizer: Stateful, group: Group, param: Tensor, fresh: dict[tuple[torch.device, float], Tensor]
) -> None:
    """Create the missing states of a parameter. Parameters that start together share a step counter of ``fresh``."""
    names = optimizer.state_names(group)
    if not names and not group["master_weights"]:
        return
    state = optimizer.state[param]
    if has_master(group, param) and "master" not in state:
        state["master"] = param.detach().to(torch.float32, copy=True)
    elif "master" in state and not is_narrow(param.dtype):
        del state["master"]  # the model had 16 bits before, and no longer needs a master
    if not names:
        return
    missing = [name for name in names if state.get(name) is None]
    for name in names:
        keeps_more = name in optimizer.float_states or "master" in state
        dtype = torch.bfloat16 if is_rounded(group) else wide(param.dtype) if keeps_more else param.dtype
        if name in missing:
            state[name] = torch.zeros_like(param, dtype=dtype)
        elif state[name].dtype != dtype:  # the parameter has a new dtype or a new master
            state[name] = state[name].to(dtype)
    if not isinstance(state.get("step"), Tensor | None):
        state["step"] = torch.tensor([float(state["step"])], dtype=torch.float32, device=param.device)
    if missing or "step" not in state:
        begun = (param.device, 0.0 if missing else 1.0)  # 1: loaded from torch.optim.SGD, which does not count
        if begun not in fresh:
            fresh[begun] = torch.full((1,), begun[1], dtype=torch.float32, device=param.device)
        state["step"] = fresh[begun]


def split_steps(optimizer: Stateful, group: Group, members: list[Tensor]) -> None:
    """Give the members, which take the next step, other step counters than the group's parameters that skip it."""
    stepped = set(map(id, members))
    state = optimizer.state
    skipped = {state[p].get("step") for p in group["params"] if id(p) not in stepped and p in state}
    own: dict[Tensor, Tensor] = {}
    for param in members:
        step = state[param].get("step") if param in state else None
        if step is not None and step in skipped:
            state[param]["step"] = own.setdefault(step, step.clone())


def restore_bits(optimizer: Stateful, saved: dict[Any, Tensor], states: dict[Any, State]) -> None:
    """Restore what torch's loading changes: states that it cast to the parameter's dtype, and shared step counters."""
    steps: dict[Any, Tensor] = {}
    group_of = {id(p): (index, group) for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for number, param in saved.items():
        given, state = states.get(number, {}), optimizer.state.get(param, {})
        index, group = group_of[id(param)]
        all_wide = "master" in given or has_master(group, param)
        rounded = optimizer.state_names(group) if is_rounded(group) else ()
        for name, value in given.items():
            if name == "step" or not isinstance(value, Tensor):
                continue
            if name in rounded or all_wide or name in optimizer.float_states:
                dtype = torch.bfloat16 if name in rounded else wide(param.dtype)
                state[name] = value.to(device=param.device, dtype=dtype, copy=True)
        if not is_narrow(param.dtype):
            state.pop("master", None)
        if "step" in given:
            key = (index, param.device, float(given["step"]))
            if key not in steps:
                steps[key] = torch.tensor([key[2]], dtype=torch.float32, device=param.device)
            state["step"] = steps[key]
