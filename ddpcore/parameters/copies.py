"""Copies of a model: of the other virtual learners, and for evaluation."""

import copy
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import is_parametrized

from ddpcore.parameters.hooks import node_hooks

_REGISTERED = ("_parameters", "_buffers", "_modules")  # attributes of a module, which deepcopy copies
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_SIMPLE = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, torch.dtype, torch.device)


def copies_of(model: nn.Module, num: int) -> list[nn.Module]:
    """The model, and full copies of it for the other learners, with hooks, attributes and gradients of parameters.

    ValueError: Python cannot copy the model, or something of it would still belong to the first learner.
    """
    return [model, *(_learner_of(model) for _ in range(1, num))]


def _learner_of(model: nn.Module) -> nn.Module:
    try:
        memo = _memo_of(model)
        copied = _copied(model, memo)
        for parameter, own in zip(model.parameters(), copied.parameters(), strict=True):
            vars(own).update(copy.deepcopy(vars(parameter), memo))
            if hasattr(parameter, "grad_dtype"):  # not in each version of torch
                own.grad_dtype = parameter.grad_dtype
            own.grad = None if parameter.grad is None else parameter.grad.detach().clone()
            for hook in _hooks_of(parameter, "_backward_hooks"):
                own.register_hook(copy.deepcopy(hook, memo))
            for hook in _hooks_of(parameter, "_post_accumulate_grad_hooks"):
                own.register_post_accumulate_grad_hook(copy.deepcopy(hook, memo))
            _copy_node_hooks(parameter, own, memo)
    except Exception as error:
        what = f"every virtual learner gets a copy of the model, and copy.deepcopy fails with {type(error).__name__}"
        raise ValueError(f"{what}: {error}: give the model a __deepcopy__, or run real ranks") from error
    _check_functions(model, copied, "the model of each virtual learner")
    return copied


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy of a model that may keep activations, which torch cannot copy: they are copied without their graph.

    An activation of a finished vmap cannot be read, and becomes an empty tensor. ValueError: Python cannot copy the
    model, or a function in it would still call the model itself.
    """
    try:
        copied = _copied(model, _memo_of(model))
    except Exception as error:
        what = f"the model for evaluation is a copy, and copy.deepcopy fails with {type(error).__name__}: {error}"
        raise ValueError(f"{what}: give the model a __deepcopy__") from error
    _check_functions(model, copied, "the model for evaluation")
    return copied


def overwrite(buffer: Tensor, values: Tensor) -> None:
    """Overwrite a buffer and so its views. An expanded one, or of another shape or dtype, gets memory of its own."""
    is_other = (buffer.shape, buffer.dtype) != (values.shape, values.dtype)
    if is_other or 0 in buffer.stride() or buffer.is_inference():
        buffer.data = values.clone()
    else:
        buffer.data.copy_(values)


def _copy_node_hooks(parameter: Tensor, own: Tensor, memo: dict[int, Any]) -> None:
    """Copy the hooks of the accumulation node of a parameter, which lives as long as something holds it."""
    if not parameter.requires_grad:
        return
    for register in ("register_prehook", "register_hook"):
        for hook in node_hooks(parameter, register):
            held = vars(own).setdefault("_accumulation_node", get_gradient_edge(own).node)
            getattr(held, register)(copy.deepcopy(hook, memo))


def _memo_of(model: nn.Module) -> dict[int, Any]:
    """What deepcopy regards as copied: activations, by id."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in _tensors_in(vars(module)):
            if torch._C._functorch.is_batchedtensor(tensor):
                memo[id(tensor)] = torch.empty(0, dtype=torch.float32, device="cpu")
            elif tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                # .data, because the graph of a changed view cannot be used
                memo[id(tensor)] = tensor.data.clone()
    return memo


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    with torch.no_grad():  # else parameters of torch.jit layers would be results of a graph
        copied = copy.deepcopy(model, memo)
    for parameter, own in zip(model.parameters(), copied.parameters(), strict=True):
        own.requires_grad_(parameter.requires_grad)
    for module in filter(is_parametrized, copied.modules()):
        # A class of its own, because torch keeps parametrizations and their cache in the class.
        module.__class__ = type(module).__bases__[0]
        parametrize._inject_new_class(module)
        for name in cast(nn.ModuleDict, module.parametrizations):
            parametrize._inject_property(module, name)
    return copied


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _hooks_of(parameter: Tensor, kind: str) -> list[Callable[..., Any]]:
    return [hook for hook in (getattr(parameter, kind) or {}).values() if not _is_ours(hook)]


def _is_ours(value: Any) -> bool:
    return (getattr(value, "__module__", None) or type(value).__module__ or "").partition(".")[0] == "ddpcore"


def _check_functions(model: nn.Module, copied: nn.Module, what: str) -> None:
    """Raise ValueError if a function in a copy holds a part of the model: Python copies no functions."""
    own = set(map(id, [*model.modules(), *model.parameters(), *model.buffers()]))
    places = [(f"module {name}" if name else "the model", vars(module)) for name, module in copied.named_modules()]
    for name, one in copied.named_parameters():
        places.append((f"parameter {name}", {kind: _hooks_of(one, kind) for kind in _PARAMETER_HOOKS}))
    for place, attributes in places:
        for key, value in attributes.items():
            if key not in _REGISTERED and _holds(value, own):
                why = f"is or has a function that holds the model itself, so {what} would use its weights"
                advice = "take the module from the function's arguments, or set it on each of handle.models"
                raise ValueError(f"{place}: {key} {why}: make it a method, or {advice} after distribute()")


def _holds(value: Any, own: set[int]) -> bool:
    """Whether a value is one of ``own``, by id, or leads to one by containers, functions, references and attributes."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, _SIMPLE) or id(value) in seen:
            continue
        if id(value) in own:
            return True
        seen.add(id(value))
        if not _is_ours(value):
            waiting += _next(value)
    return False


def _next(value: Any) -> list[Any]:
    if isinstance(value, Tensor | nn.Module | types.FrameType | types.TracebackType):
        return []
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, types.FunctionType):
        if (value.__module__ or "").startswith("torch.ao."):  # of a qconfig, and asks the model for its device alone
            return []
        used = [value.__globals__.get(name) for name in value.__code__.co_names]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        used = [one for one in used if isinstance(one, Tensor | nn.Module)]
        return [*(value.__closure__ or ()), *defaults, *vars(value).values(), *used]
    return gc.get_referents(value)  # of containers, cells, methods, and of attributes with and without a __dict__
