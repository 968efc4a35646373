"""The option ``state_dtype``: momentum and moments in bfloat16, rounded stochastically.

The random bits of an element depend on the number of steps that its parameter has taken, on the number of the parameter
in the optimizer, and on the place of the element in the memory of the parameter. So they are the same for a list and a
flat buffer, for any number of threads, on every rank and for every virtual learner: ranks that have the same weights
and gradients keep the same weights. The shards of a DTensor have ranges of places that do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddpcore.ops.dtypes import is_narrow
from ddpcore.optim.batch import Group, State
from ddpcore.optim.shards import first_of_shard
from ddpcore.parameters.flat import FlatParameters

STATE_DTYPES = ("float32", "bfloat16")
ELEMENTS = 2**40  # more than a parameter has: the indices of two parameters never overlap

Named = Iterable[tuple[tuple[str | int, Tensor], Group]]


def name_of(dtype: Any) -> Any:
    """The name of a dtype, such as ``bfloat16``, because groups and files hold text. Anything else stays as it is."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def is_rounded(group: Group) -> bool:
    """Whether momentum and moments of the group's parameters are rounded stochastically."""
    return bool(name_of(group.get("state_dtype")) == "bfloat16")


def check_roundable(named: Named, loaded: Mapping[int, State] | None = None) -> None:
    """Raise ValueError if a parameter cannot have the rounded states that its group asks for.

    Args:
        named: names, parameters and their groups.
        loaded: states that are about to be loaded, by the id of the parameter.
    """
    for (name, param), group in named:
        if not is_rounded(group):
            continue
        has_master = loaded is not None and loaded.get(id(param), {}).get("master") is not None
        if is_narrow(param.dtype) and (group["master_weights"] or has_master):
            raise ValueError(
                f"parameter {name} has a float32 master weight, whose momentum and moments are float32, and "
                "state_dtype is bfloat16: leave out master_weights or state_dtype"
            )


def check_loaded(
    optimizer: torch.optim.Optimizer, groups: Sequence[Group], saved: Mapping[Any, Tensor], states: Mapping[Any, State]
) -> None:
    """Raise ValueError if a parameter cannot have the rounded states of a state_dict.

    Args:
        optimizer: that loads it.
        groups: the groups of the optimizer, with the options of the state_dict.
        saved: the parameter of each number in the state_dict.
        states: the states in the state_dict, by number.
    """
    loaded = {id(param): states.get(number, {}) for number, param in saved.items()}
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        names = own["param_names"] if "param_names" in own else group["params"]
        check_roundable(((pair, group) for pair in zip(names, own["params"], strict=False)), loaded)


def firsts_of(params: Sequence[Tensor], named: Named, flat: FlatParameters | None) -> list[int]:
    """The index of the first element of each parameter among the random numbers.

    Args:
        params: some of the optimizer's parameters.
        named: all of them, in their order.
        flat: the buffer of which they are views. Virtual learners have the numbers of the first one.
    """
    num = 0 if flat is None else len(flat.segments)
    first_of = {} if flat is None else {id(p): id(flat.parameters[i % num]) for i, p in enumerate(flat.parameters)}
    numbers: dict[int, int] = {}
    for (_, param), _ in named:
        if first_of.get(id(param), id(param)) == id(param):
            numbers[id(param)] = len(numbers)
    return [numbers[first_of.get(id(param), id(param))] * ELEMENTS + first_of_shard(param) for param in params]
