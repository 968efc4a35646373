"""Command lines from dataclasses: a field is a flag, its type parses the text, its option holds the allowed values."""

from __future__ import annotations

import argparse
import os
import tempfile
import types
from collections.abc import Sequence
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from typing_extensions import override

from ddpcore.options.registry import Registry
from ddpcore.options.typed import check_choice, check_range, typed

SEED_RANGE: dict[str, Any] = {"least": 0, "below": 2**62}
Config = TypeVar("Config")


def option(
    default: Any,
    help: str = "",
    *,
    choices: Sequence[str] = (),
    parts: Registry[Any] | None = None,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    most: float | None = None,
    is_file: bool = False,
    positional: bool = False,
    **more: Any,
) -> Any:
    """A dataclass field that is also a flag of the command line.

    Args:
        default: of the field.
        help: one clause; choices and default are added to it.
        choices: values that :func:`check` allows, for a list each of its items.
        parts: the value is the name of a part of this kind, or a list of such names.
        least, above, below, most: bounds of a number, for :func:`check`.
        is_file: the value is a file that will be written; :func:`check` tests that this is possible.
        positional: a word of the command line without a flag.
        more: arguments of ``argparse.ArgumentParser.add_argument`` in place of those that follow from the field's type.
    """
    bounds = {"least": least, "above": above, "below": below, "most": most}
    allowed = {"choices": tuple(choices), "parts": parts, "bounds": bounds, "is_file": is_file}
    return field(default=default, metadata={"help": help, **allowed, "positional": positional, "more": more})


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def names(text: str) -> tuple[str, ...]:
    """``"a, b"`` as ``("a", "b")``."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def settings(text: str) -> dict[str, Any]:
    """``"hidden=512x256, dropout=0.1"`` as ``{"hidden": (512, 256), "dropout": 0.1}``; other values stay text."""
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


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ValueError, with a message of one line, where argparse would exit.

    Attributes:
        example: a command line, with which the help begins.
    """

    example = ""

    @override
    def format_help(self) -> str:
        return (f"example: {self.example}\n\n" if self.example else "") + super().format_help()

    @override
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")


def parse(config: type[Config], argv: Sequence[str] | None, *, prog: str, description: str, epilog: str = "") -> Config:
    """The command line as a config; every field of its class was made by :func:`option`.

    Raises:
        ValueError: the words do not fit the fields; the message is one line.
    """
    parser = Parser(prog=prog, description=description, epilog=epilog, allow_abbrev=False)
    add_options(parser, config)
    return config(**vars(parser.parse_args(argv)))


def add_options(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    """Add a flag to the parser for each field of a config class. Flags that are left out set no attribute.

    The class may have an ``EXAMPLE``, see :class:`Parser`.
    """
    if isinstance(parser, Parser):
        parser.example = getattr(config, "EXAMPLE", "")
    hints = get_type_hints(config)
    for item in fields(config):
        about = item.metadata
        default = ",".join(item.default) if isinstance(item.default, tuple) else item.default
        shown = "" if default in (None, MISSING) else f" (default: {default})"
        arguments = {**_argument_of(hints[item.name]), "default": argparse.SUPPRESS, **about["more"]}
        if about["is_file"]:
            arguments["metavar"] = "FILE"
        names = about["choices"] if about["parts"] is None else (*about["parts"].names(), "or module:attribute")
        arguments["help"] = ": ".join(filter(None, (about["help"], ", ".join(names)))) + shown
        if about["positional"]:
            parser.add_argument(item.name, **{"nargs": "?", **arguments})
        else:
            parser.add_argument(flag(item.name), dest=item.name, **arguments)


def _argument_of(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of a type."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is tuple:
        return {"type": names, "metavar": "A,B,..."}
    if get_origin(hint) is dict:
        return {"type": settings, "metavar": "KEY=VALUE,..."}
    return {"type": hint}


def check(config: Any) -> None:
    """Check the fields of a config against the choices, the bounds and the files of their options. None always passes.

    Raises:
        ValueError: a value is not allowed; one line that begins with its flag.
    """
    for item in fields(config):
        value, about, name = getattr(config, item.name), item.metadata, flag(item.name)
        if value is None:
            continue
        if isinstance(value, float):
            typed(name, value, float)  # refuses NaN and infinity
        check_range(name, value, **about["bounds"])
        if isinstance(value, tuple) and not about["positional"]:
            _check_list(name, value)
        for one in value if isinstance(value, tuple) else (value,):
            if about["choices"]:
                check_choice(name, one, about["choices"])
            if about["parts"] is not None:
                _check_part(name, one, about["parts"])
        if about["is_file"]:
            _check_writable(name, Path(os.path.realpath(value)))  # resolve() refuses a loop of links


def _check_part(name: str, part: str, parts: Registry[Any]) -> None:
    try:
        parts.find(part)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_list(name: str, values: Sequence[Any]) -> None:
    if not values:
        raise ValueError(f"{name} is empty: give at least one value, or leave it out")
    if len(set(values)) != len(values):
        raise ValueError(f"{name} names one twice: name each once")


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
