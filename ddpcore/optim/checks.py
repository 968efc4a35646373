"""Checks of options: a ValueError names the option and its value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import Tensor

Group = dict[str, Any]

TENSOR_STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq", "master")


def is_number(value: Any) -> bool:
    """Whether it is a real number of any library."""
    return isinstance(value, Real)


def check_number(name: str, value: Any, low: float = 0.0, below: float = math.inf) -> None:
    """Raise ValueError unless ``low <= value < below``."""
    if not (is_number(value) or (isinstance(value, Tensor) and value.numel() == 1)) or not low <= value < below:
        range_ = f"of at least {low:g}" if below == math.inf else f"in [{low:g}, {below:g})"
        raise ValueError(f"{name} is {value}: it must be a number {range_}")


def check_lr(lr: Any) -> None:
    """A learning rate may be a tensor; one on another device than the CPU is not read: that would wait for it."""
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr is a tensor of {lr.numel()} elements: it must have one")
        if not lr.is_floating_point():
            raise ValueError(f"lr is a tensor of {lr.dtype}: it must be of floating point")
        if lr.device.type != "cpu":
            return
        lr = lr.item()
    check_number("lr", lr)


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(map(str, choices))}")


def check_common(group: Group) -> None:
    """The options that all fused optimizers have."""
    check_lr(group["lr"])
    check_number("weight_decay", group["weight_decay"])
    norm = group["max_grad_norm"]
    if norm is not None and not (is_number(norm) and 0 < norm < math.inf):
        raise ValueError(f"max_grad_norm is {norm}: it must be a number above 0, or None")
    check_choice("maximize", group["maximize"], (True, False))
    check_choice("master_weights", group["master_weights"], (True, False))


def check_one_norm(groups: Sequence[Group]) -> None:
    """Gradients are clipped by the norm of all of them, so the groups must agree on how."""
    for group in groups:
        if group["max_grad_norm"] != groups[0]["max_grad_norm"]:
            raise ValueError(
                f"max_grad_norm is {group['max_grad_norm']} in one group and {groups[0]['max_grad_norm']} in another: "
                "the norm is that of all gradients together"
            )


def check_momentum(group: Group) -> None:
    """The options of momentum SGD."""
    check_number("momentum", group["momentum"])
    if not is_number(group["dampening"]) or not math.isfinite(group["dampening"]):
        raise ValueError(f"dampening is {group['dampening']}: it must be a number")
    check_choice("nesterov", group["nesterov"], (True, False))
    check_choice("decoupled_weight_decay", group["decoupled_weight_decay"], (True, False))
    if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError(
            f"nesterov is {group['nesterov']} with momentum {group['momentum']} and dampening {group['dampening']}: "
            "it needs momentum > 0 and dampening 0"
        )


def check_accepted(differentiable: bool) -> None:
    """``foreach``, ``fused`` and ``capturable`` are taken as torch takes them and change nothing: this is one path."""
    if differentiable:
        raise ValueError("differentiable is True: the fused step has no gradient; use torch.optim for that")


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements are one place in memory, as those of an expanded tensor."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def check_state(index: Any, param: Tensor, state: dict[str, Any], buffers: Sequence[str]) -> None:
    """Of a state_dict: whether it is one of this parameter, and of an optimizer with these buffers."""
    foreign = [name for name in state if name not in (*buffers, "step", "master")]
    if foreign:
        raise ValueError(
            f"state_dict: parameter {index} has {', '.join(map(str, foreign))}, of another optimizer: this one keeps "
            f"{', '.join(buffers)}"
        )
    for name, value in state.items():
        if name == "step":
            if not (is_number(value) or (isinstance(value, Tensor) and value.numel() == 1)):
                raise ValueError(f"state_dict: step of parameter {index} is {value}: it must be one number")
        elif name in TENSOR_STATES and value is not None and not isinstance(value, Tensor):
            raise ValueError(f"state_dict: {name} of parameter {index} is {value!r}: it must be a tensor")
        elif isinstance(value, Tensor) and value.shape != param.shape:
            raise ValueError(
                f"state_dict: {name} of parameter {index} has shape {tuple(value.shape)}, "
                f"the parameter has {tuple(param.shape)}"
            )
