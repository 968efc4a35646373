"""Nested state as JSON and tensors, and back; reading it never executes code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_PLAIN = (bool, int, float, str, type(None))
_TENSOR, _TUPLE, _ITEMS = "__tensor__", "__tuple__", "__items__"  # keys that mark what JSON does not have


def pack(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Convert state to a tree for JSON, with names in place of tensors, and the tensors by name, flat and on the CPU.

    Takes dicts (of text or other plain keys), lists, tuples, tensors, numbers, text and None; TypeError for anything
    else. Tensors keep the order of their elements in memory (``channels_last``), without gaps between them.
    """
    tensors: dict[str, Tensor] = {}

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            dense = torch.empty_like(value, requires_grad=False).copy_(value.detach())
            tensors[path] = dense.as_strided((dense.numel(),), (1,)).cpu()
            return {_TENSOR: path, "shape": list(dense.shape), "stride": list(dense.stride()), "on": dense.device.type}
        if isinstance(value, Mapping):
            if all(isinstance(key, str) for key in value):
                return {key: visit(item, f"{path}.{key}") for key, item in value.items()}
            return {_ITEMS: [[visit(key, path), visit(item, f"{path}.{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            items = [visit(item, f"{path}.{number}") for number, item in enumerate(value)]
            return items if isinstance(value, list) else {_TUPLE: items}
        if isinstance(value, _PLAIN):
            return value
        raise TypeError(
            f"cannot save {path.lstrip('.')}, a {type(value).__name__}: give tensors, numbers, text or lists"
        )

    return visit(state, ""), tensors


def unpack(tree: Any, tensors: Mapping[str, Tensor], device: torch.device | str) -> Any:
    """The state that :func:`pack` converted; tensors from an accelerator are moved to ``device``."""
    if isinstance(tree, list):
        return [unpack(item, tensors, device) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        value = tensors[tree[_TENSOR]].as_strided(tree["shape"], tree["stride"])
        return value if tree["on"] == "cpu" else value.to(device)
    if _TUPLE in tree:
        return tuple(unpack(item, tensors, device) for item in tree[_TUPLE])
    if _ITEMS in tree:
        return {unpack(key, tensors, device): unpack(item, tensors, device) for key, item in tree[_ITEMS]}
    return {key: unpack(item, tensors, device) for key, item in tree.items()}
