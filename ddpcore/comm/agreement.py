"""The check that all ranks train the same model with the same settings. Without it they would hang or diverge."""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import takewhile
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcore.comm.groups import Fact, gather_objects
from ddpcore.runtime.launch import end_with_torchrun

_LONGEST = 100  # characters of a fact in a message


def describe(value: Any) -> str:
    """Return the type and the public attributes of an object as text.

    A dataclass gives the fields that it is compared by, an optimizer its class and its defaults, a function its name. A
    field with ``new`` in its metadata is left out if it is None, as in checkpoints of earlier versions.
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
        found = [(one, getattr(value, one.name)) for one in fields(value) if one.compare]
        told = [(one.name, item) for one, item in found if item is not None or not one.metadata.get("new")]
        items = {name.strip("_"): item for name, item in told}
    elif isinstance(value, torch.optim.Optimizer):
        items = value.defaults
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        items = vars(value)
    else:
        return repr(value)
    public = [f"{name}={describe(item)}" for name, item in items.items() if not name.startswith("_")]
    return f"{type(value).__name__}({', '.join(public)})"


def identify(cls: type) -> str:
    """The module and the name of a class; of a class outside of ddpcore and torch also a digest of its source."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls.__module__.split(".")[0] in ("ddpcore", "torch", "builtins"):
        return name
    try:
        return f"{name} (source {hashlib.sha256(inspect.getsource(cls).encode()).hexdigest()[:8]})"
    except (OSError, TypeError):  # defined where there is no file
        return name


def facts_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: object, settings: Mapping[str, Any]
) -> list[Fact]:
    """Return the facts that must be equal on all ranks: settings, strategy, optimizer, parameters and buffers."""
    facts = [(name, value if isinstance(value, str) else describe(value)) for name, value in settings.items()]
    facts += [("strategy", describe(strategy)), ("optimizer", type(optimizer).__name__)]
    parts = {"strategy": strategy, "topology": getattr(strategy, "topology", None), "optimizer": optimizer}
    facts += [(f"class of the {name}", identify(type(part))) for name, part in parts.items()]
    for what, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            more = "" if what == "buffer" or tensor.requires_grad else " frozen"
            if tensor.requires_grad and not tensor.is_contiguous():  # rows are exchanged in memory order
                more = f" of strides {list(tensor.stride())}"
            facts.append((f"{what} {name}", f"{str(tensor.dtype)[6:]} {list(tensor.shape)}{more}"))
    return facts


def check_agreement(group: dist.ProcessGroup, facts: Sequence[Fact], timeout: float) -> None:
    """Compare the facts of all ranks. Each rank sends a digest if they are equal. Collective.

    ValueError, on every rank: facts or their order differ. It names a rank and its first difference from rank 0.
    """
    end_with_torchrun()  # from here on, a rank of torchrun ends when its agent has died
    what = "the check that all ranks train the same"
    if len(set(gather_objects(group, hashlib.sha256(repr(facts).encode()).hexdigest(), what, timeout))) == 1:
        return
    everyone = gather_objects(group, list(facts), what, timeout)
    for rank, theirs in enumerate(everyone):
        if (difference := first_difference(everyone[0], theirs)) is not None:
            what, here, there = difference
            raise ValueError(f"ranks do not train the same: {what} is {there} on rank {rank} and {here} on rank 0")


def first_difference(facts: Sequence[Fact], others: Sequence[Fact]) -> tuple[str, str, str] | None:
    """The name of the first difference, and the values on both sides."""
    mine, theirs = dict(facts), dict(others)
    for what in [*mine, *theirs]:
        left, right = mine.get(what, "missing"), theirs.get(what, "missing")
        if left != right:
            start = 0
            if max(len(left), len(right)) > _LONGEST:  # such as a matrix: show the part around the difference
                alike = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
                start = max(0, sum(1 for _ in alike) - _LONGEST // 2)
            return what, left[start : start + _LONGEST], right[start : start + _LONGEST]
    if list(mine) != list(theirs):
        what, other = next((a, b) for a, b in zip(mine, theirs, strict=True) if a != b)
        return "the order of parameters and buffers", what, other
    return None
