"""The grammar of settings: ``strategy.topology=ring`` sets a key in nested tables, for command lines and files alike.

A table whose key ``name`` names a part also holds the options of this part. ``model=mlp`` is short for
``model.name=mlp``, and ``model.hidden=[64,64]`` is an option of this model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Table = dict[str, Any]


def parse_settings(texts: Sequence[str], before: str = "") -> Table:
    """Nested tables from texts ``KEY=VALUE``, in this order. A value is parsed as TOML; if that fails, it is text.

    A key is a name, or names with dots between them. A later text replaces the value of an earlier one. ValueError, in
    one line with the word ``before`` each text: a text has another form.
    """
    result: Table = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not all(part.strip() for part in key.split(".")):
            raise ValueError(f"{before}{text}: write KEY=VALUE, such as optimizer.lr=0.1")
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        put(result, key, parsed)
    return result


def put(table: Table, key: str, value: Any) -> None:
    """Set the key, with dots between the tables. A name in its way becomes a table: ``"mlp"`` is ``{"name": "mlp"}``.

    A value for a key that has a table is its name. A table for a key that has a table is merged into it.
    """
    *path, last = (part.strip() for part in key.split("."))
    for part in path:
        inner = table.get(part, {})
        table[part] = table = dict(inner) if isinstance(inner, Mapping) else {"name": inner}
    known = table.get(last)
    if isinstance(value, Mapping) and known is not None:
        table[last] = {**(known if isinstance(known, Mapping) else {"name": known}), **value}
    elif isinstance(known, Mapping):
        table[last] = {**known, "name": value}
    else:
        table[last] = value


def get(table: Mapping[str, Any], key: str) -> Any:
    """The value of a key as in :func:`put`; None if it is not there. The value of a named part is its name."""
    value: Any = table
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value["name"] if isinstance(value, Mapping) and "name" in value else value


def dotted(table: Mapping[str, Any], before: str = "") -> Table:
    """All values by their keys with dots, as :func:`get` finds them: nested tables as one, without empty ones."""
    found: Table = {}
    for key, value in table.items():
        name = before + key
        if isinstance(value, Mapping):
            found |= dotted(value, f"{name}.")
        else:
            found[before.removesuffix(".") if key == "name" and before else name] = value
    return found
