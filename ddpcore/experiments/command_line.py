"""The commands ``list``, ``run`` and ``compare`` as frozen values, read from the command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from ddpcore.experiments.study import SCALES
from ddpcore.options.command_line import SEED_RANGE, Parser, add_options, check, option
from ddpcore.options.suggest import suggest
from ddpcore.training import TrainConfig
from ddpcore.training.config import OPTIONS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """List the studies, or the rows of one."""

    study: str | None = option(None, "a study", positional=True)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Train the rows of a study, each with several seeds.

    Raises:
        ValueError: an option has a value that is not allowed.
    """

    study: str = option(
        MISSING, "a name of `list`, or a file of your own that ends in .toml", positional=True, nargs=None
    )
    rows: tuple[str, ...] | None = option(None, "names of rows (default: those of the scale)")
    scale: str = option("full", choices=SCALES)
    data_dir: Path | None = option(None, "folder of the data sets' files", metavar="DIR")
    download: bool = option(False, "fetch missing files into --data-dir first", action="store_true")
    out: Path | None = option(None, "folder of the results (default: runs/STUDY/SCALE)", metavar="DIR")
    seed: int = option(0, "the first seed", metavar="N", **SEED_RANGE)
    seeds: int | None = option(None, "number of seeds (default: that of the study)", least=1, metavar="N")
    world_size: int | None = option(None, "run rows of N learners on N ranks, not virtually", least=1, metavar="N")
    jobs: int = option(1, "runs at the same time, which share the cores", least=1, metavar="N")
    resume: bool = option(False, "continue in --out; finished runs are not repeated", action="store_true")
    set: Sequence[str] | None = option(
        None, "a field of TrainConfig, for all rows", action="append", type=str, metavar="KEY=VALUE"
    )

    def __post_init__(self) -> None:
        check(self)

    def overrides(self) -> dict[str, Any]:
        """Fields of every row; see :func:`overrides` for errors."""
        given: dict[str, Any] = {} if self.data_dir is None else {"data_dir": str(self.data_dir)}
        return {**overrides(self.set or ()), **given, **({"download": True} if self.download else {})}


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Print published and measured numbers side by side, and a verdict on each claim."""

    runs: Sequence[Path] = option(
        MISSING, "a folder that `run` wrote", positional=True, nargs="+", type=Path, metavar="RUN"
    )
    markdown: Path | None = option(None, "write the page", is_file=True)
    plot: Path | None = option(None, "write a plot, .png or .svg (extra `plot`)", is_file=True)

    def __post_init__(self) -> None:
        check(self)


COMMANDS = {"list": ListOptions, "run": RunOptions, "compare": CompareOptions}


def parse(argv: Sequence[str] | None) -> ListOptions | RunOptions | CompareOptions:
    """The options of the command that the first word names.

    Raises:
        ValueError: the words are no command; the message is one line.
    """
    parser = Parser(prog="python -m ddpcore.experiments", description="Published experiments: run them, compare them.")
    commands = parser.add_subparsers(dest="command", required=True, metavar=" | ".join(COMMANDS))
    for name, options in COMMANDS.items():
        help = (options.__doc__ or "").splitlines()[0]
        add_options(commands.add_parser(name, help=help, description=help, allow_abbrev=False), options)
    given = vars(parser.parse_args(argv))
    return COMMANDS[given.pop("command")](**given)


def overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Fields of TrainConfig from ``key=value``; ``optimizer_options.momentum=0.5`` reaches into a mapping.

    A value is TOML, or else text. The last value of a field counts; mappings are merged key by key.

    Raises:
        ValueError: there is no such field, and the message suggests the nearest one; or options were given to a field
            that is no mapping, or another value to a field that is one.
    """
    known = tuple(item.name for item in fields(TrainConfig))
    result: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        name, *inner = key.strip().split(".")
        if not equals or len(inner) > 1:
            raise ValueError(f"--set {text}: write KEY=VALUE, or KEY.OPTION=VALUE")
        if name not in known:
            raise ValueError(f"--set {text}: a training run has no field {name!r}: {suggest(name, known)}")
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
