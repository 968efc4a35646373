"""The commands ``list``, ``run``, ``compare`` and ``landscape`` as frozen dataclasses, parsed from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from ddpcore.display.chart import PLOT, check_plot
from ddpcore.experiments.study import SCALES
from ddpcore.options.command_line import Parser, add_flags
from ddpcore.options.fields import SEED_RANGE, check, field
from ddpcore.options.keys import parse_settings
from ddpcore.storage.limits import NUM_RUNS
from ddpcore.training.config import check_settings, merged
from ddpcore.training.landscapes import BATCH_NORM, NUM_SAMPLES, PLANES


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """List the studies, or the rows of one study."""

    EXAMPLE = "ddpcore experiments list mnist-effective-lr"

    study: str | None = field(None, "a study", positional=True)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Train the rows of a study, each with several seeds.

    Raises:
        ValueError: an option has a value that is not allowed.
    """

    EXAMPLE = "ddpcore experiments run saddle-escape --scale smoke --out runs/saddle"

    study: str = field(
        MISSING, "a name of `list`, or a file of your own that ends in .toml", positional=True, nargs=None
    )
    rows: tuple[str, ...] | None = field(None, "names of rows, or patterns ('ssgd-*'); default: the rows of the scale")
    scale: str = field("full", choices=SCALES)
    data_dir: Path | None = field(None, "folder of the data sets' files", metavar="DIR")
    download: bool = field(False, "fetch missing files into --data-dir first", action="store_true")
    out: Path | None = field(None, "folder of the results (default: runs/STUDY/SCALE)", metavar="DIR")
    seed: int = field(0, "the first seed", metavar="N", **SEED_RANGE)
    seeds: int | None = field(None, "number of seeds (default: the study's)", least=1, metavar="N")
    max_runs: int = field(NUM_RUNS, "refuse more runs than this, rows x seeds", least=1, metavar="N")
    world_size: int | None = field(None, "run rows of N learners on N ranks, not virtually", least=1, metavar="N")
    jobs: int = field(1, "runs at the same time, which share the cores", least=1, metavar="N")
    resume: bool = field(False, "continue in --out; finished runs are not repeated", action="store_true")
    set: Sequence[str] | None = field(
        None, "a setting of all rows, see `ddpcore train --fields`", action="append", type=str, metavar="KEY=VALUE"
    )

    plot: Path | None = PLOT

    def __post_init__(self) -> None:
        check(self)
        check_plot(self.plot)

    def overrides(self) -> dict[str, Any]:
        """The sections of a TrainConfig that the command line sets for every row. ValueError: see the functions."""
        given = parse_settings(self.set or (), "--set ")
        check_settings(given, "--set")
        if "seed" in given.get("run", ()):
            raise ValueError("--set run.seed: use --seed and --seeds")
        data: dict[str, Any] = {} if self.data_dir is None else {"data_dir": str(self.data_dir)}
        data |= {"download": True} if self.download else {}
        return merged(given, {"data": data} if data else {})


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Print published and measured numbers side by side, and a verdict on each claim."""

    EXAMPLE = "ddpcore experiments compare runs/saddle --plot saddle.png"

    runs: Sequence[Path] = field(
        MISSING, "a folder that `run` wrote", positional=True, nargs="+", type=Path, metavar="RUN"
    )
    markdown: Path | None = field(None, "write the page", is_file=True)
    plot: Path | None = PLOT

    def __post_init__(self) -> None:
        check(self)
        check_plot(self.plot)


@dataclass(frozen=True, kw_only=True)
class LandscapeOptions:
    """Draw the loss around the final models of runs of `ddpcore train`, over planes in weight space.

    Raises:
        ValueError: an option has a value that is not allowed.
    """

    EXAMPLE = "ddpcore experiments landscape runs/ssgd runs/dpsgd --points 25"

    runs: Sequence[Path] = field(
        MISSING, "a folder that `ddpcore train` wrote", positional=True, nargs="+", type=Path, metavar="RUN"
    )
    plane: str = field("random", "directions; solutions goes through three runs", choices=tuple(PLANES))
    points: int = field(25, "K, for K x K points", least=2, metavar="K")
    span: float | None = field(
        None,
        "from the model to the border, in lengths of the directions (1); margin around solutions (0.25)",
        above=0,
        metavar="S",
    )
    seed: int = field(0, "of random directions", metavar="N", **SEED_RANGE)
    batch_norm: str | None = field(
        None, "of each point (default: eval, between solutions recalibrate)", choices=BATCH_NORM
    )
    split: str = field("train", "of the data", choices=("train", "validation", "test"))
    samples: int | None = field(
        None, f"so many random images of it (default: {NUM_SAMPLES}, or all)", least=1, metavar="N"
    )
    ratio: bool = field(
        False, "also a map of |smallest / largest eigenvalue|, some tens of products a point", action="store_true"
    )
    out: Path | None = field(None, "folder of all files (default: RUN/landscape)", metavar="DIR")
    data_dir: Path | None = field(None, "folder of the data set's files, if it has moved", metavar="DIR")
    world_size: int = field(1, "share the points among N processes", least=1, metavar="N")

    def __post_init__(self) -> None:
        check(self)
        if self.plane == "solutions" and len(self.runs) != 3:
            raise ValueError(f"--plane solutions goes through three runs, and {len(self.runs)} are named: name three")

    def arguments(self) -> dict[str, Any]:
        """The arguments of :func:`ddpcore.training.landscapes.landscape_of` but for runs and files."""
        names = ("plane", "points", "span", "seed", "batch_norm", "split", "samples", "ratio")
        return {name: getattr(self, name) for name in names}


COMMANDS = {"list": ListOptions, "run": RunOptions, "compare": CompareOptions, "landscape": LandscapeOptions}


def parse(argv: Sequence[str] | None) -> ListOptions | RunOptions | CompareOptions | LandscapeOptions:
    """The options of the command that the first word names.

    Raises:
        ValueError: the words are no command; the message is one line.
    """
    parser = Parser(prog="ddpcore experiments", description="Published experiments: run them, compare them.")
    parser.example = RunOptions.EXAMPLE
    commands = parser.add_subparsers(dest="command", required=True, metavar=" | ".join(COMMANDS))
    for name, options in COMMANDS.items():
        help = (options.__doc__ or "").splitlines()[0]
        add_flags(commands.add_parser(name, help=help, description=help, allow_abbrev=False), options)
    given = vars(parser.parse_args(argv))
    return COMMANDS[given.pop("command")](**given)
