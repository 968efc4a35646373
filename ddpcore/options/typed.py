"""Checks of values that a person wrote: their type, their range, and what to do about a name that is not known."""

import math
import sys
import types
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from operator import ge, gt, le, lt
from pathlib import Path
from types import MappingProxyType
from typing import Any, Union, get_args, get_origin

import numpy as np

OTHER_NAMES = {"learning_rate": "lr"}  # what people write, and the name it has here
Bound = float | None  # None: there is none


def suggest(value: Any, allowed: Iterable[str], others: Mapping[str, str] = MappingProxyType({})) -> str:
    """What to do about a value that is none of those allowed: take the nearest one, or one of all of them.

    ``others`` are further names that may be meant, with what to write for each.
    """
    allowed = tuple(allowed)
    names = {name: name for name in allowed} | {other: name for other, name in OTHER_NAMES.items() if name in allowed}
    names = {**others, **names}
    if nearest := get_close_matches(str(value), names, n=1):
        return f"did you mean {names[nearest[0]]!r}?"
    return f"choose from {', '.join(allowed)}" if allowed else "it takes none, leave it out"


def typed(name: str, value: Any, hint: Any) -> Any:
    """The value as a field of that hint holds it: an int as a number, a list as a tuple. ValueError: another kind."""
    value = value.item() if isinstance(value, np.generic) else value  # of np.logspace, say
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        return None if value is None else typed(name, value, kinds[0])
    if hint is float and is_finite(value):
        return float(value)
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        kind = get_args(hint)[0]
        if kind != tuple[int, int] or all(isinstance(item, list | tuple) and len(item) == 2 for item in value):
            return tuple(typed(name, item, kind) for item in value)
    if get_origin(hint) is Mapping and isinstance(value, Mapping):
        kind = get_args(hint)[1]
        if kind is Any:
            return without_numpy(value)  # a copy, as a file would hold it
        return {str(key): typed(f"{name}.{key}", item, kind) for key, item in value.items()}
    if hint is str and isinstance(value, Path):
        return str(value)
    if type(value) is hint and hint is not float:
        return value
    spoken = {float: "a finite number", int: "a whole number", bool: "true or false", str: "text"}
    wanted = spoken.get(hint, "a mapping")
    if get_origin(hint) is tuple:
        items = {str: "text", float: "numbers", int: "numbers", tuple[int, int]: "pairs, such as [[300, 256]]"}
        value, wanted = without_numpy(value), f"a list of {items.get(get_args(hint)[0], 'mappings')}"
    raise ValueError(f"{name} is {value!r}: it must be {wanted}")


def is_finite(value: Any) -> bool:
    """Whether it is a number, of those that a float can be."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def without_numpy(value: Any) -> Any:
    """The value without NumPy scalars and tuples, recursively, as JSON and TOML hold it."""
    if isinstance(value, Mapping):
        return {str(key): without_numpy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_numpy(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def check_range(
    name: str, value: Bound, *, least: Bound = None, most: Bound = None, above: Bound = None, below: Bound = None
) -> None:
    """Raise ValueError unless the number keeps all bounds that are given. None, for a number left out, keeps all."""
    bounds = (("at least", least, ge), ("above", above, gt), ("at most", most, le), ("below", below, lt))
    given = [(word, bound, keeps) for word, bound, keeps in bounds if bound is not None]
    if value is not None and not all(keeps(value, bound) for _, bound, keeps in given):
        wanted = " and ".join(f"{word} {_spell(bound)}" for word, bound, _ in given)
        raise ValueError(f"{name} is {value}: it must be {wanted}")


def _spell(bound: float) -> str:
    return f"2^{math.log2(bound):g}" if bound >= 2**53 else f"{bound:g}"


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise ValueError unless the value is one of those allowed; the message has the nearest one, or all."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}: {suggest(value, allowed)}")


def check_keys(what: str, keys: Iterable[Any], allowed: Iterable[str]) -> None:
    """Raise ValueError unless all keys are among those allowed: ``what has no 'key': did you mean ...?``."""
    allowed = tuple(allowed)
    for key in keys:
        if key not in allowed:
            raise ValueError(f"{what} has no {key!r}: {suggest(key, allowed)}")


def check_table(
    what: str, values: Any, hints: Mapping[str, Any], required: Iterable[str] = (), *, more_keys: bool = False
) -> None:
    """Raise ValueError unless it is a mapping with all required keys, whose values have the types of the hints, by key.

    ``what`` the mapping is stands in the message. With ``more_keys`` keys without a hint are allowed.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{what} is {values!r}: it must be a table")
    if not more_keys:
        check_keys(what, values, hints)
    for key in required:
        if key not in values:
            raise ValueError(f"{what} has no {key!r}: it needs one")
    for key, value in values.items():
        if key in hints:
            typed(f"{what}: {key}", value, hints[key])
