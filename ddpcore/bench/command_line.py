"""What the commands of the bench share: flags from fields, errors of one line, files that are whole or not there."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ddpcore.metrics import to_json

BOOLEAN = argparse.BooleanOptionalAction
"""The action of a flag that has a ``--no-`` form."""
Config = TypeVar("Config")


def option(default: Any, help: str, **more: Any) -> Any:
    """A field that is a flag, or with ``positional=True`` a word without one. ``more`` goes to ``argparse``."""
    return field(default=default, metadata={"help": help, **more})


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def names(text: str) -> tuple[str, ...]:
    """``"a, b"`` as ``("a", "b")``."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def settings(text: str) -> dict[str, Any]:
    """``"hidden=512x256, dropout=0.1"`` as ``{"hidden": (512, 256), "dropout": 0.1}``; what is no number stays text."""
    found = {}
    for part in names(text):
        key, equals, value = part.partition("=")
        if not (key.strip() and equals):
            raise argparse.ArgumentTypeError(f"{part!r} is not of the form key=value")
        numbers = [_number(piece) for piece in value.split("x")]
        found[key.strip()] = value if None in numbers else numbers[0] if len(numbers) == 1 else tuple(numbers)
    return found


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return None


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")


def parse(config: type[Config], argv: Sequence[str] | None, *, prog: str, description: str, epilog: str = "") -> Config:
    """The config that the command line says; every field of its class was made by :func:`option`.

    Raises:
        ValueError: it says none; the message is one line.
    """
    parser = _Parser(prog=prog, description=description, epilog=epilog, allow_abbrev=False)
    for item in fields(config):  # type: ignore[arg-type]
        options = dict(item.metadata)
        default = ",".join(item.default) if isinstance(item.default, tuple) else item.default
        options["help"] += "" if default in (None, MISSING) else f" (default: {default})"
        if options.pop("positional", False):
            parser.add_argument(item.name, nargs="?", default=argparse.SUPPRESS, **options)
        else:
            parser.add_argument(flag(item.name), dest=item.name, default=argparse.SUPPRESS, **options)
    return config(**vars(parser.parse_args(argv)))


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ValueError unless the value of a field is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"unknown {flag(name)} {value!r}: choose from {', '.join(allowed)}")


def check_names(name: str, values: Sequence[str], allowed: Sequence[str], what: str) -> None:
    """Raise ValueError unless a field names some of those allowed, each once."""
    for value in values:
        if value not in allowed:
            raise ValueError(f"unknown {what} {value!r}: choose from {', '.join(allowed)}")
    if len(set(values)) != len(values):
        raise ValueError(f"{flag(name)} names one twice: name each once")
    if not values:
        raise ValueError(f"{flag(name)} is empty: choose from {', '.join(allowed)}")


def check_writable(path: Path, name: str = "json") -> None:
    """Raise ValueError, before anything runs, where the file of a flag could not be written."""
    if path.is_dir():
        raise ValueError(f"{flag(name)}: {path} is a folder: name a file")
    if not path.parent.is_dir():
        raise ValueError(f"{flag(name)}: the folder {path.parent} does not exist: make it first")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(
            f"{flag(name)}: cannot write into {path.parent} ({error.strerror}): name another file"
        ) from None


def write_json(path: Path, result: dict[str, Any]) -> None:
    """All of it or nothing: a reader never meets half a file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(to_json(result), indent=2, allow_nan=False) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
