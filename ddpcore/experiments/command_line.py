"""The commands ``list``, ``run`` and ``compare`` as frozen dataclasses, parsed from the command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from ddpcore.experiments.study import SCALES
from ddpcore.options.command_line import SEED_RANGE, Parser, add_options, check, option
from ddpcore.options.typed import check_keys
from ddpcore.training import TrainConfig
from ddpcore.training.config import OPTIONS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """List the studies, or the rows of one study."""

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
        """The fields of TrainConfig that the command line sets for every row; see :func:`overrides` for errors."""
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
    """Fields of TrainConfig from ``key=value``; ``optimizer_options.momentum=0.5`` sets one key of a mapping.

    A value is parsed as TOML; if that fails it is text. A later text replaces the value of an earlier one, or the keys
    of its mapping.

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
            raise ValueError(f"--set {text}: write KEY=VALUE, or KEY.OPTION=VALUE")
        check_keys(f"--set {text}: a training run", [name], known)
        if name == "seed":
            raise ValueError(f"--set {text}: use --seed and --seeds")
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        given = {inner[0]: parsed} if inner else parsed
        if isinstance(given, Mapping) != (name in OPTIONS):
            form = f"{name}.OPTION=VALUE" if name in OPTIONS else f"{name}=VALUE, it has no options"
            raise ValueError(f"--set {text}: write {form}")
        result[name] = {**result.get(name, {}), **given} if name in OPTIONS else given
    return result
