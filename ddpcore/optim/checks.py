"""Checks of options and of loaded states. A ValueError names the option and its value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from ddpcore.optim.batch import Group
from ddpcore.optim.rounding import STATE_DTYPES, name_of
from ddpcore.optim.shards import check_shard_of_state, local
from ddpcore.options.typed import check_range

_OF_TORCH = ("capturable", "differentiable", "foreach", "fused")


def is_number(value: Any) -> bool:
    """Whether it is a real number, of Python, numpy or any other library."""
    return isinstance(value, Real)


def is_scalar(value: Any) -> bool:
    """Whether it is a real number or a tensor of one element."""
    return is_number(value) or (isinstance(value, Tensor) and value.numel() == 1)


def check_number(name: str, value: Any, below: float | None = None) -> None:
    """Raise ValueError unless the value is finite and ``0 <= value < below``."""
    if not is_scalar(value) or not math.isfinite(value):
        raise ValueError(f"{name} is {value}: it must be a finite number")
    check_range(name, value, least=0, below=below)


def check_lr(lr: Any) -> None:
    """Check a number or a tensor. The value of a tensor on a GPU is not checked, because reading it would block."""
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr is a tensor of {lr.numel()} elements: it must have one")
        if not lr.is_floating_point():
            raise ValueError(f"lr is a tensor of {lr.dtype}: it must have a floating-point dtype")
        if lr.device.type != "cpu":
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
    if norm is not None and not (is_number(norm) and 0 < norm < math.inf):
        raise ValueError(f"max_grad_norm is {norm}: it must be a number above 0, or None")
    check_flag("maximize", group["maximize"])
    check_flag("master_weights", group["master_weights"])
    if (dtype := name_of(group.get("state_dtype", "float32"))) not in STATE_DTYPES:
        raise ValueError(f"state_dtype is {dtype}: it must be {' or '.join(STATE_DTYPES)}")


def check_one_norm(groups: Sequence[Group]) -> None:
    """Raise ValueError unless the groups agree on ``max_grad_norm``, which bounds the norm of all gradients."""
    for group in groups:
        if group["max_grad_norm"] != groups[0]["max_grad_norm"]:
            raise ValueError(
                f"max_grad_norm is {group['max_grad_norm']} in one group and {groups[0]['max_grad_norm']} in another: "
                "it bounds the norm of all gradients together, so set the same value in all groups"
            )


def check_momentum(group: Group) -> None:
    """Check the options of momentum SGD."""
    check_number("momentum", group["momentum"])
    if not is_number(group["dampening"]) or not math.isfinite(group["dampening"]):
        raise ValueError(f"dampening is {group['dampening']}: it must be a finite number")
    check_flag("nesterov", group["nesterov"])
    check_flag("decoupled_weight_decay", group["decoupled_weight_decay"])
    if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError(
            f"nesterov is {group['nesterov']} with momentum {group['momentum']} and dampening {group['dampening']}: "
            "it needs momentum > 0 and dampening 0"
        )


def check_differentiable(differentiable: bool) -> None:
    """Raise ValueError if it is true."""
    if differentiable:
        raise ValueError("differentiable is True: the fused step has no gradient; use torch.optim for that")


def check_new(group: Group) -> None:
    """Raise ValueError unless a new group of a fused optimizer can be stepped."""
    check_differentiable(group.get("differentiable", False))
    check_once(group)
    if found := [param.dtype for param in group["params"] if param.is_complex()]:
        raise ValueError(f"a parameter is {found[0]}: pass torch.view_as_real of it, or real parameters")


def check_once(group: Group) -> None:
    """Raise ValueError if a parameter is in a group twice."""
    names = group.get("param_names", range(len(group["params"])))
    seen: set[int] = set()
    for name, param in zip(names, group["params"], strict=True):
        if id(param) in seen:
            raise ValueError(f"parameter {name} is twice in its group: name it once, as model.parameters() does")
        seen.add(id(param))


def options_of(group: Group) -> Group:
    """A loaded group without the options that say how torch computes a step. ValueError if it is differentiable."""
    check_differentiable(group.get("differentiable", False))
    return {name: value for name, value in group.items() if name not in _OF_TORCH}


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether several elements share one place in memory, as in an expanded tensor."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def check_tensors(name: str, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Raise RuntimeError if the optimizer ``name`` cannot step these parameters with these gradients."""
    if True in [grad.is_sparse for grad in grads]:
        raise RuntimeError(
            f"{name} needs dense gradients: use nn.Embedding(sparse=False), or another optimizer for this parameter"
        )
    if [(grad.dtype, grad.device) for grad in grads] != [(param.dtype, param.device) for param in params]:
        raise RuntimeError(f"{name}: a gradient must have the dtype and device of its parameter")
    if True in [overlaps_itself(local(param)) for param in params]:
        raise RuntimeError(f"{name}: a parameter overlaps itself in memory: pass a clone of it")


def check_state(index: Any, param: Tensor, state: dict[str, Any], buffers: Sequence[str]) -> None:
    """Raise ValueError unless a loaded state fits the parameter and an optimizer with these buffers."""
    foreign = [name for name in state if name not in (*buffers, "step", "master")]
    if foreign:
        raise ValueError(
            f"state_dict: parameter {index} has {', '.join(map(str, foreign))}, of another optimizer: this one keeps "
            f"{', '.join(buffers)}"
        )
    needed = (*buffers, "step") if "exp_avg" in buffers else ()
    missing = [name for name in needed if state.get(name) is None]
    if missing and len(missing) < len(needed):
        raise ValueError(
            f"state_dict: parameter {index} lacks {', '.join(missing)}: load the whole state, or none of that parameter"
        )
    for name, value in state.items():
        if name == "step":
            if not is_scalar(value) or not 0 <= float(value) < math.inf:
                raise ValueError(f"state_dict: step of parameter {index} is {value}: it must be a number from 0 on")
        elif value is not None and not isinstance(value, Tensor):
            raise ValueError(f"state_dict: {name} of parameter {index} is {value!r}: it must be a tensor")
        elif value is not None and not value.is_floating_point():
            raise ValueError(f"state_dict: {name} of parameter {index} is {value.dtype}: it must be floating-point")
        elif value is not None and value.shape != param.shape:
            raise ValueError(
                f"state_dict: {name} of parameter {index} has shape {tuple(value.shape)}, "
                f"the parameter has {tuple(param.shape)}"
            )
        elif value is not None:
            check_shard_of_state(index, name, param, value)
