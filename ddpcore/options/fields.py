"""A field of a config: its default, meaning and possible values, for Python, files and flags; and how settings name it.

``strategy.topology=ring`` sets a key in nested tables, for command lines and files alike. A table whose key ``name``
names a part also holds the options of this part. ``model=mlp`` is short for ``model.name=mlp``, and
``model.hidden=[64,64]`` is an option of this model.
"""

import dataclasses
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpcore.options.registry import Registry
from ddpcore.options.typed import check_choice, check_range, typed

SEED_RANGE: dict[str, Any] = {"least": 0, "below": 2**62}


def field(
    default: Any,
    about: str = "",
    *,
    choices: Sequence[str] = (),
    parts: Registry[Any] | None = None,
    is_file: bool = False,
    positional: bool = False,
    **more: Any,
) -> Any:
    """A field of a frozen dataclass.

    Args:
        default: of the field; a class, such as ``dict``, makes a new one for each config.
        about: its meaning, one clause.
        choices: the values that :func:`check` allows, for a list each of its items.
        parts: the value is the name of a part of this kind, or a list of such names.
        is_file: the value is a file that will be written; :func:`check` tests that this is possible.
        positional: a word of the command line without a flag.
        more: ``least``, ``above``, ``below`` and ``most``, bounds of a number, for :func:`check`; and arguments of
            ``argparse.ArgumentParser.add_argument`` in place of those that follow from the field's type.
    """
    bounds = {name: more.pop(name, None) for name in ("least", "above", "below", "most")}
    allowed = {"choices": tuple(choices), "parts": parts, "bounds": bounds, "is_file": is_file}
    metadata = {"about": about, **allowed, "positional": positional, "more": more}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def check(config: Any) -> None:
    """:func:`check_value` of all fields of a config, each of which was made by :func:`field`."""
    for item in dataclasses.fields(config):
        check_value(flag(item.name), getattr(config, item.name), item)


def check_value(name: str, value: Any, item: dataclasses.Field[Any]) -> None:
    """Raise ValueError, which begins with the name, unless a value suits choices, bounds and file of its field.

    None always does.
    """
    about = item.metadata
    if value is None:
        return
    if isinstance(value, float):
        typed(name, value, float)  # refuses NaN and infinity
    check_range(name, value, **about["bounds"])
    if isinstance(value, tuple) and item.default != () and not about["positional"]:
        if not value:
            raise ValueError(f"{name} is empty: give at least one value, or leave it out")
        if len(set(value)) != len(value):
            raise ValueError(f"{name} names one twice: name each once")
    for one in value if isinstance(value, tuple) else (value,):
        if about["choices"]:
            check_choice(name, one, about["choices"])
        if about["parts"] is not None:
            try:
                about["parts"].find(one)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    if about["is_file"]:
        _check_writable(name, Path(os.path.realpath(value)))  # resolve() refuses a loop of links


def _check_writable(name: str, path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{name}: {path} is a folder: name a file")
    if not path.parent.is_dir():
        raise ValueError(f"{name}: the folder {path.parent} does not exist: make it first")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"{name}: cannot write into {path.parent} ({error.strerror}): name another file") from None


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

parse_toml = tomllib.loads
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
    else:
        table[last] = {**known, "name": value} if isinstance(known, Mapping) else value


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
