"""What the command line says, as frozen values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from ddpcore.advice import advice
from ddpcore.engine import TrainConfig
from ddpcore.engine.config import OPTIONS
from ddpcore.experiments.study import SCALES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """``list``: the studies, or the rows of one."""

    study: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """``run``: see its ``--help``.

    Raises:
        ValueError: a number is out of its range.
    """

    study: str
    rows: tuple[str, ...] | None = None
    scale: str = "full"
    data_dir: Path | None = None
    out: Path | None = None
    seed: int = 0
    seeds: int | None = None
    world_size: int | None = None
    jobs: int = 1
    download: bool = False
    resume: bool = False
    set: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ValueError(f"unknown --scale {self.scale!r}: {advice(self.scale, SCALES)}")
        for name in ("seeds", "world_size", "jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}: it must be at least 1")
        if self.seed < 0:
            raise ValueError(f"--seed is {self.seed}: it must be at least 0")
        if self.rows is not None and not self.rows:
            raise ValueError("--rows is empty: name rows, or leave it out for all")

    def overrides(self) -> dict[str, Any]:
        """Fields of every row."""
        given: dict[str, Any] = {} if self.data_dir is None else {"data_dir": str(self.data_dir)}
        return {**self.set, **given, **({"download": True} if self.download else {})}


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """``compare``: folders, and files to write."""

    runs: tuple[Path, ...]
    markdown: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        for name in ("markdown", "plot"):
            path = getattr(self, name)
            if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
                raise ValueError(f"--{name}: {path} is no file in a folder that exists: name one")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")


def parse(argv: Sequence[str] | None) -> ListOptions | RunOptions | CompareOptions:
    """What the command line says.

    Raises:
        ValueError: it says nothing that can be done; the message is one line.
    """
    given = vars(_parser().parse_args(argv))
    command = given.pop("command")
    if command == "list":
        return ListOptions(**given)
    if command == "compare":
        return CompareOptions(**{**given, "runs": tuple(given["runs"])})
    return RunOptions(**{**given, "set": overrides(given.get("set", ()))})


def _parser() -> _Parser:
    whole = _Parser(prog="python -m ddpcore.experiments", description="Published experiments: run them, compare them.")
    commands = whole.add_subparsers(dest="command", required=True, metavar="list | run | compare")

    def add(name: str, help: str) -> _Parser:
        made: _Parser = commands.add_parser(
            name, help=help, description=help, allow_abbrev=False, argument_default=argparse.SUPPRESS
        )
        return made

    known = add("list", "the studies, or the rows of one")
    known.add_argument("study", nargs="?")
    run = add("run", "train the rows of a study, each with several seeds")
    run.add_argument("study", help="a name of `list`, or a file of your own that ends in .toml")
    run.add_argument("--rows", type=_names, metavar="A,B,...", help="these alone (default: those of the scale)")
    run.add_argument("--scale", help=f"{', '.join(SCALES)} (default: full)")
    run.add_argument("--data-dir", type=Path, help="the folder of the data sets' files")
    run.add_argument("--download", action="store_true", help="fetch missing files into --data-dir first")
    run.add_argument("--out", type=Path, help="the folder of the results (default: runs/STUDY/SCALE)")
    run.add_argument("--seed", type=int, help="the first (default: 0)")
    run.add_argument("--seeds", type=int, metavar="N", help="how many (default: as the study says)")
    run.add_argument("--world-size", type=int, metavar="N", help="rows of N learners run on N ranks, not virtually")
    run.add_argument("--jobs", type=int, metavar="N", help="runs side by side, which share the cores (default: 1)")
    run.add_argument("--resume", action="store_true", help="go on with what is in --out; finished runs are left alone")
    run.add_argument("--set", action="append", metavar="KEY=VALUE", help="a field of TrainConfig, of all rows")
    compared = add("compare", "published beside measured, and a verdict on each claim")
    compared.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder that `run` wrote")
    compared.add_argument("--markdown", type=Path, metavar="FILE", help="write the page")
    compared.add_argument("--plot", type=Path, metavar="FILE", help="write a plot, .png or .svg (extra `plot`)")
    return whole


def overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Fields of TrainConfig from ``key=value``; ``optimizer_options.momentum=0.5`` reaches into a mapping.

    A value is TOML; what is none is text. Of two for one field the later one holds; mappings are merged key by key.

    Raises:
        ValueError: there is no such field, and the message has the nearest one; or a mapping is asked of one that has
            none, or something else of one that is a mapping.
    """
    known = tuple(item.name for item in fields(TrainConfig))
    result: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        name, *inner = key.strip().split(".")
        if not equals or len(inner) > 1:
            raise ValueError(f"--set {text}: write KEY=VALUE, or KEY.OPTION=VALUE")
        if name not in known:
            raise ValueError(f"--set {text}: a training run has no field {name!r}: {advice(name, known)}")
        if name == "seed":
            raise ValueError(f"--set {text}: seeds are those of --seed and --seeds")
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        given = {inner[0]: parsed} if inner else parsed
        if isinstance(given, Mapping) != (name in OPTIONS):
            written = f"{name}.OPTION=VALUE" if name in OPTIONS else f"{name}=VALUE, it has no options"
            raise ValueError(f"--set {text}: write {written}")
        result[name] = {**result.get(name, {}), **given} if inner or name in OPTIONS else given
    return result


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
