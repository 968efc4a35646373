"""Checks of options and of loaded states. A ValueError names the option and its value."""

import math
from collections.abc import Iterable, Sequence
from itertools import count, product
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ddpcore.options.typed import check_range

Group = dict[str, Any]
State = dict[str, Any]
_OF_TORCH = ("capturable", "differentiable", "foreach", "fused")  # options that say how torch computes a step


def name_of(dtype: Any) -> Any:
    """The name of a dtype, such as ``bfloat16``, because groups and files hold text. Anything else stays as it is."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def is_rounded(group: Group) -> bool:
    """Whether momentum and moments of the group's parameters are rounded stochastically."""
    return bool(name_of(group.get("state_dtype")) == "bfloat16")


def is_scalar(value: Any) -> bool:
    """Whether it is a real number, of Python, numpy or any other library, or a tensor of one element."""
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)


def check_number(name: str, value: Any, below: float | None = None) -> None:
    """Raise ValueError unless the value is finite and ``0 <= value < below``."""
    if not is_scalar(value) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}: it must be a finite number")
    check_range(name, value, least=0, below=below)


def check_lr(lr: Any) -> None:
    """Check a number or a tensor. No value is read from a GPU, which would block, or while a step is compiled."""
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr is a tensor of {lr.numel()} elements: it must have one")
        if not lr.is_floating_point():
            raise ValueError(f"lr is a tensor of {lr.dtype}: it must have a floating-point dtype")
        if lr.device.type != "cpu" or torch.compiler.is_compiling():
            return
        lr = lr.item()
    check_number("lr", lr)


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless the value is True or False."""
    if value not in (True, False):
        raise ValueError(f"{name} is {value!r}: it must be True or False")


def check_common(group: Group) -> None:
    """Check the options that all fused optimizers have."""
    check_lr(group["lr"])
    check_number("weight_decay", group["weight_decay"])
    norm = group["max_grad_norm"]
    if norm is not None and not (isinstance(norm, Real) and 0 < float(norm) < math.inf):
        raise ValueError(f"max_grad_norm is {norm}: it must be a number above 0, or None")
    check_flag("maximize", group["maximize"])
    check_flag("master_weights", group["master_weights"])
    if (dtype := name_of(group.get("state_dtype", "float32"))) not in ("float32", "bfloat16"):
        raise ValueError(f"state_dtype is {dtype}: it must be float32 or bfloat16")


def check_one_norm(groups: Sequence[Group]) -> None:
    """Raise ValueError unless the groups agree on ``max_grad_norm``, which bounds the norm of all gradients."""
    for group in groups:
        if group["max_grad_norm"] != groups[0]["max_grad_norm"]:
            what = f"max_grad_norm is {group['max_grad_norm']} in one group and {groups[0]['max_grad_norm']} in another"
            advice = "it bounds the norm of all gradients together, so set the same value in all groups"
            raise ValueError(f"{what}: {advice}")


def check_momentum(group: Group) -> None:
    """Check the options of momentum SGD."""
    check_number("momentum", group["momentum"])
    if not isinstance(group["dampening"], Real) or not math.isfinite(group["dampening"]):
        raise ValueError(f"dampening is {group['dampening']}: it must be a finite number")
    check_flag("nesterov", group["nesterov"])
    check_flag("decoupled_weight_decay", group["decoupled_weight_decay"])
    if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
        what = f"nesterov is {group['nesterov']} with momentum {group['momentum']} and dampening {group['dampening']}"
        raise ValueError(f"{what}: it needs momentum > 0 and dampening 0")


def check_moments(group: Group, before: str = "") -> None:
    """Check the options of Adam's moments; ``before`` is what their names begin with."""
    betas = group[f"{before}betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"{before}betas is {betas}: it must be two numbers")
    for index, beta in enumerate(betas):
        check_number(f"{before}betas[{index}]", beta, below=1.0)
    check_number(f"{before}eps", group[f"{before}eps"])


def check_new(group: Group) -> None:
    """Raise ValueError unless a new group of a fused optimizer can be stepped."""
    options_of(group)
    names, seen = group.get("param_names", range(len(group["params"]))), set[int]()
    for name, param in zip(names, group["params"], strict=True):
        if id(param) in seen:
            raise ValueError(f"parameter {name} is twice in its group: name it once, as model.parameters() does")
        seen.add(id(param))
    if found := [param.dtype for param in group["params"] if param.is_complex()]:
        raise ValueError(f"a parameter is {found[0]}: pass torch.view_as_real of it, or real parameters")


def options_of(group: Group) -> Group:
    """A group without the options that say how torch computes a step. ValueError if it is differentiable."""
    if group.get("differentiable", False):
        raise ValueError("differentiable is True: the fused step has no gradient; use torch.optim for that")
    return {name: value for name, value in group.items() if name not in _OF_TORCH}


def check_capture(groups: Sequence[Group], options: Iterable[str]) -> None:
    """Raise RuntimeError if replays of a captured step, which run no Python, would not do what the step does."""
    for group, name in product(groups, options):
        value = group[name]
        read = name == "lr" and group.get("rule") != "muon" and group["params"]  # Muon reads lr on the host
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, Tensor) and not (read and one.device == group["params"][0].device):
                way_out = "put it on the device of the parameters" if read else "pass a number"
                raise RuntimeError(f"{name} is a tensor, and a CUDA graph keeps its value of the capture: {way_out}")
    for group in groups:
        if group.get("period", 1) > 1:
            raise RuntimeError(f"period is {group['period']}, and a CUDA graph repeats one kind of step: leave it out")
        for name, param in zip(group.get("param_names", count()), group["params"], strict=False):
            if param.requires_grad and param.grad is None:
                what = f"parameter {name} of a group has no gradient, so no replay of a CUDA graph would step it"
                raise RuntimeError(f"{what}: run its backward pass first, or freeze it by requires_grad_(False)")


def is_capturing(tensor: Tensor) -> bool:
    """Whether a kernel launched now for the tensor would be captured in a CUDA graph."""
    return tensor.is_cuda and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()
