"""Command lines from dataclasses: a field is a flag, and its type parses the text."""

import argparse
import types
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from typing_extensions import override

from ddpcore.options.fields import field, flag

Config = TypeVar("Config")
RUNS: dict[str, Any] = {"positional": True, "nargs": "+", "type": Path, "metavar": "RUN"}  # of a field: several folders
SETTINGS: Any = field((), "a setting of `train --fields`", positional=True, nargs="*", type=str, metavar="KEY=VALUE")


def names(text: str) -> tuple[str, ...]:
    """``"a, b"`` as ``("a", "b")``."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ValueError, with a message of one line, where argparse would exit."""

    example = ""  # a command line, with which the help begins

    @override
    def format_help(self) -> str:
        return (f"example: {self.example}\n\n" if self.example else "") + super().format_help()

    @override
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")


def parse(config: type[Config], argv: Sequence[str] | None, *, prog: str, epilog: str = "") -> Config:
    """The command line as a config, whose docstring is in the help; ``fields.field`` made every field of its class.

    ValueError: the words do not fit the fields; the message is one line.
    """
    parser = Parser(prog=prog, description=config.__doc__, epilog=epilog, allow_abbrev=False)
    add_flags(parser, config)
    # Words without a flag may stand before, between and after flags.
    return config(**vars(parser.parse_intermixed_args(argv)))


def add_flags(parser: Parser, config: type[Any]) -> None:
    """Add a flag to the parser for each field of a config class. Flags that are left out set no attribute.

    The class may have an ``EXAMPLE``, see :class:`Parser`.
    """
    parser.example = getattr(config, "EXAMPLE", "")
    hints = get_type_hints(config)
    for item in fields(config):
        about = item.metadata
        arguments = {**_argument_of(hints[item.name]), "default": argparse.SUPPRESS, **about["more"]}
        if about["is_file"]:
            arguments["metavar"] = "FILE"
        arguments["help"] = described(item)
        if about["positional"]:
            parser.add_argument(item.name, **{"nargs": "?", **arguments})
        else:
            parser.add_argument(flag(item.name), dest=item.name, **arguments)


def described(item: Any) -> str:
    """A field in one line: its meaning, the values to choose from, its default if it has one."""
    about, default = item.metadata, item.default
    shown = ",".join(default) if isinstance(default, tuple) and all(type(one) is str for one in default) else default
    names = about["choices"] if about["parts"] is None else (*about["parts"].names(), "or module:attribute")
    text = ": ".join(filter(None, (about["about"], ", ".join(names))))
    return text if shown in (None, MISSING, "", ()) else f"{text} (default: {shown})"


def _argument_of(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of a type."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": names, "metavar": "A,B,..."} if get_origin(hint) is tuple else {"type": hint}
