"""Whether all ranks are about to train the same: what they would otherwise find out by hanging, or never."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import takewhile
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Fact = tuple[str, str]  # what it is about, and what this rank has there
_LONGEST = 100  # characters of a fact in a message


def describe(value: Any) -> str:
    """The type and the public values of an object; of dataclasses all that they are compared by.

    Of a function only the name is known; of an optimizer its class and its defaults, whatever made it.
    """
    if isinstance(value, partial):
        return describe([value.func, value.args, value.keywords])
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.tolist()}"
    if isinstance(value, FunctionType):
        return value.__qualname__
    if isinstance(value, list | tuple):
        return f"({', '.join(map(describe, value))})"
    if isinstance(value, dict):
        return describe([*value.items()])
    if is_dataclass(value):
        items = {field.name.strip("_"): getattr(value, field.name) for field in fields(value) if field.compare}
    elif isinstance(value, torch.optim.Optimizer):
        items = value.defaults
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        items = vars(value)
    else:
        return repr(value)
    public = [f"{name}={describe(item)}" for name, item in items.items() if not name.startswith("_")]
    return f"{type(value).__name__}({', '.join(public)})"


def facts_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: object, settings: Mapping[str, Any]
) -> list[Fact]:
    """What must be the same on all ranks: what is trained, and settings by their names."""
    facts = [(name, value if isinstance(value, str) else describe(value)) for name, value in settings.items()]
    facts += [("strategy", describe(strategy)), ("optimizer", type(optimizer).__name__)]
    parameters, buffers = list(model.named_parameters()), list(model.named_buffers())
    for what, tensors in (("parameter", parameters), ("buffer", buffers)):
        for name, tensor in tensors:
            more = "" if what == "buffer" or tensor.requires_grad else " frozen"
            if tensor.requires_grad and not tensor.is_contiguous():  # rows are exchanged as they lie
                more = f" of strides {list(tensor.stride())}"
            facts.append((f"{what} {name}", f"{str(tensor.dtype)[6:]} {list(tensor.shape)}{more}"))
    return facts


def check_agreement(group: dist.ProcessGroup, facts: Sequence[Fact], device: torch.device) -> None:
    """Compare facts in their order; 32 bytes a rank where they agree. Collective.

    Raises:
        ValueError: on every rank alike; it names the rank and the first difference from rank 0.
    """
    digest = hashlib.sha256(repr(facts).encode()).digest()
    own = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    digests = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, own, group=group)
    if all(torch.equal(digests[0], other) for other in digests):
        return
    everyone: list[Any] = [None] * len(digests)
    dist.all_gather_object(everyone, list(facts), group=group)
    for rank, theirs in enumerate(everyone):
        if (difference := _first_difference(everyone[0], theirs)) is not None:
            what, here, there = difference
            raise ValueError(f"ranks do not train the same: {what} is {there} on rank {rank} and {here} on rank 0")


def _first_difference(facts: Sequence[Fact], others: Sequence[Fact]) -> tuple[str, str, str] | None:
    """What differs, and what either side has there."""
    mine, theirs = dict(facts), dict(others)
    for what in [*mine, *theirs]:
        left, right = mine.get(what, "missing"), theirs.get(what, "missing")
        if left != right:
            start = 0
            if max(len(left), len(right)) > _LONGEST:  # a matrix: show it from a little before where they part
                alike = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
                start = max(0, sum(1 for _ in alike) - _LONGEST // 2)
            return what, left[start : start + _LONGEST], right[start : start + _LONGEST]
    if list(mine) != list(theirs):
        what, other = next((a, b) for a, b in zip(mine, theirs, strict=True) if a != b)
        return "the order of parameters and buffers", what, other
    return None
