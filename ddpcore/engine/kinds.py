"""What kind of value a field or an option takes, by its type hint."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import numpy as np


def typed(name: str, value: Any, hint: Any) -> Any:
    """The value as a field of that hint holds it: an int where a number is wanted is one, a list is a tuple.

    Raises:
        ValueError: it is of another kind.
    """
    value = value.item() if isinstance(value, np.generic) else value  # of np.logspace, say
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        return None if value is None else typed(name, value, kinds[0])
    if hint is float and is_finite(value):
        return float(value)
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(typed(name, item, get_args(hint)[0]) for item in value)
    if get_origin(hint) is Mapping and isinstance(value, Mapping):
        return plain(value)  # a copy, as a file would hold it
    if hint is str and isinstance(value, Path):
        return str(value)
    if type(value) is hint and hint is not float:
        return value
    spoken = {float: "a finite number", int: "a whole number", bool: "true or false", str: "text"}
    wanted = spoken.get(hint, "a mapping" if get_origin(hint) is Mapping else "a list of numbers")
    raise ValueError(f"{name} is {value!r}: it must be {wanted}")


def is_finite(value: Any) -> bool:
    """Whether it is a number, of those that a float can be."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def plain(value: Any) -> Any:
    """Of dicts, lists, and what else there is in it."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value
