"""Nested state as JSON and tensors, and back; reading it never executes code."""

import math
from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_TENSOR, _TUPLE, _ITEMS = _MARKS = "__tensor__", "__tuple__", "__items__"  # keys that mark what JSON does not have


def pack(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Convert state to a tree for JSON, with names in place of tensors, and the tensors by name, flat and on the CPU.

    A tensor's name is its path: the keys that lead to it, joined by points. Two tensors with one path (``"a.b"`` and
    ``{"a": {"b": ...}}``) get different names.

    Takes dicts (of text or other plain keys), lists, tuples, tensors, numbers, text and None; TypeError for anything
    else. Tensors keep the order of their elements in memory (``channels_last``), without gaps between them.
    """
    tensors: dict[str, Tensor] = {}

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            name = path
            while name in tensors:
                name += "'"
            dense = torch.empty_like(value, requires_grad=False).copy_(value.detach())
            tensors[name] = dense.as_strided((dense.numel(),), (1,)).cpu()
            return {_TENSOR: name, "shape": list(dense.shape), "stride": list(dense.stride()), "on": dense.device.type}
        if isinstance(value, Mapping):
            if all(isinstance(key, str) and key not in _MARKS for key in value):
                return {key: visit(item, f"{path}.{key}") for key, item in value.items()}
            return {_ITEMS: [[visit(key, path), visit(item, f"{path}.{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            items = [visit(item, f"{path}.{number}") for number, item in enumerate(value)]
            return items if isinstance(value, list) else {_TUPLE: items}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        what = f"{path.lstrip('.')}, a {type(value).__name__}"
        raise TypeError(f"cannot save {what}: give tensors, numbers, text or lists")

    return visit(state, ""), tensors


def tensors_of(state: Any) -> list[Tensor]:
    """All tensors of a state that :func:`pack` takes."""
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


def copy_of(state: Any) -> Any:
    """A copy of a state, also of the arrays and sets in it, so that neither side sees what the other writes later."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else deepcopy(leaf), state)


def versions_of(state: Any) -> Any:
    """The versions of a model's modules, from its state: torch has them in an attribute, which files do not keep."""
    return copy_of(getattr(state, "_metadata", None))


def versioned(state: Mapping[str, Any], versions: Any) -> Any:
    """A copy of a model's state with the versions of its modules, by which these convert older states."""
    result: Any = OrderedDict(copy_of(state))  # torch copies weights and buffers only when it loads
    result._metadata = versions
    return result


def unpack(tree: Any, tensors: Mapping[str, Tensor], device: torch.device | str) -> Any:
    """The state that :func:`pack` converted; tensors of an accelerator go to ``device``. ValueError: shapes differ."""

    def visit(value: Any) -> Any:
        if isinstance(value, list):
            return [visit(item) for item in value]
        if not isinstance(value, dict):
            return value
        if _TENSOR in value:
            name = value[_TENSOR]
            if math.prod(value["shape"]) != tensors[name].numel():
                raise ValueError(f"{name.lstrip('.')} has another number of elements than its tensor")
            tensor = tensors[name].as_strided(value["shape"], value["stride"])
            return tensor if value["on"] == "cpu" else tensor.to(device)
        if _TUPLE in value:
            return tuple(visit(item) for item in value[_TUPLE])
        if _ITEMS in value:
            return {visit(key): visit(item) for key, item in value[_ITEMS]}
        return {key: visit(item) for key, item in value.items()}

    return visit(tree)
