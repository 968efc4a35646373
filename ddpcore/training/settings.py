"""Fields of a ``TrainConfig`` from texts ``KEY=VALUE``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ddpcore.options.typed import check_keys
from ddpcore.training.config import OPTIONS, TrainConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def settings(texts: Sequence[str], before: str = "") -> dict[str, Any]:
    """Fields of TrainConfig from ``key=value``; ``optimizer_options.momentum=0.5`` sets one key of a mapping.

    A value is parsed as TOML; if that fails it is text. A later text replaces the value of an earlier one, or the keys
    of its mapping.

    Args:
        texts: in this order.
        before: the word before each text in error messages.

    Raises:
        ValueError: there is no such field, a field without options is given a mapping, or a field of options is given
            another value.
    """
    known = [item.name for item in fields(TrainConfig)]
    result: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        name, *inner = key.strip().split(".")
        if not equals or len(inner) > 1:
            raise ValueError(f"{before}{text}: write KEY=VALUE, or KEY.OPTION=VALUE")
        check_keys(f"{before}{text}: a training run", [name], known)
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        given = {inner[0]: parsed} if inner else parsed
        if isinstance(given, Mapping) != (name in OPTIONS):
            form = f"{name}.OPTION=VALUE" if name in OPTIONS else f"{name}=VALUE, it has no options"
            raise ValueError(f"{before}{text}: write {form}")
        result[name] = {**result.get(name, {}), **given} if name in OPTIONS else given
    return result
