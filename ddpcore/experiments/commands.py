"""The commands of ``ddpcore experiments``: list, run, compare, landscape, each with its options."""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ddpcore.display.chart import PLOT, Plotted
from ddpcore.display.table import cell_of, console_of
from ddpcore.experiments import study
from ddpcore.experiments.charts import plot_comparison
from ddpcore.experiments.compare import compare, markdown, print_comparison, run_label
from ddpcore.experiments.landscapes import LandscapeOptions, landscapes
from ddpcore.experiments.plan import RunPlan, backend_of, check_data, check_folder, cost_of, make_plan
from ddpcore.experiments.run import run, run_in_torchrun, warn
from ddpcore.experiments.study import SCALES
from ddpcore.options.command_line import RUNS, Parser, add_flags
from ddpcore.options.fields import SEED_RANGE, field, parse_settings
from ddpcore.records.study import FAILED, Folder
from ddpcore.runtime import launch
from ddpcore.storage.files import NUM_RUNS, locked, replace_file, shown
from ddpcore.training.build import Datasets
from ddpcore.training.config import check_settings, merged


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """List the studies, or the rows of one study."""

    EXAMPLE = "ddpcore experiments list mnist-effective-lr"

    study: str | None = field(None, "a study", positional=True)


@dataclass(frozen=True, kw_only=True)
class RunOptions(Plotted):
    """Train the rows of a study, each with several seeds."""

    EXAMPLE = "ddpcore experiments run digits-large-rate --scale cpu --rows ssgd-1.2,local-1.2 --out runs/rate"

    study: str = field(MISSING, "a name of `list`, or your own file that ends in .toml", positional=True, nargs=None)
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
class CompareOptions(Plotted):
    """Print published and measured numbers side by side, and a verdict on each claim."""

    EXAMPLE = "ddpcore experiments compare runs/saddle --plot saddle.png"

    runs: Sequence[Path] = field(MISSING, "a folder that `run` wrote", **RUNS)
    markdown: Path | None = field(None, "write the page", is_file=True)
    plot: Path | None = PLOT


def _list(options: ListOptions) -> int:
    if options.study is None:
        table = Table("study", "rows", "data", "question", "published in", show_lines=True)
        for one in map(study.find_study, study.STUDIES.names()):
            data = ", ".join(sorted({row.config("full").data.name for row in one.rows.values()}))
            table.add_row(*map(cell_of, (one.name, str(len(one.rows)), data, one.question, one.source)))
    else:
        headings = ("row", "model", "strategy", "learners", "batch", "rate", "about", "published")
        lines = [_line(row) for row in study.find_study(options.study).rows.values()]
        kept = [column for column in zip(headings, *lines, strict=True) if any(column[1:])]
        table = Table(*(column[0] for column in kept), show_lines=True)
        for cells in zip(*(column[1:] for column in kept), strict=True):
            table.add_row(*map(cell_of, cells))
    console_of(wide=False).print(table)
    return 0


def _line(row: study.Row) -> tuple[str, ...]:
    """What ``list STUDY`` says about a row. A column without a word is left out."""
    config = row.config("full")
    learners = str(config.strategy.learners) + (" ranks" if row.ranks else "")
    published = ", ".join(f"{metric} {value:g}" for metric, value in row.published.items())
    numbers = str(config.data.batch_size), f"{config.optimizer.lr:g}"
    return row.name, config.model.name, config.strategy.name, learners, *numbers, row.about, published


def _run(options: RunOptions) -> int:
    torchrun = launch.torchrun_world()
    chosen = study.find_study(options.study)
    folder = Folder(options.out or Path("runs", chosen.name, options.scale))
    plan = make_plan(
        chosen,
        folder,
        rows=options.rows,
        scale=options.scale,
        overrides=options.overrides(),
        first_seed=options.seed,
        num_seeds=options.seeds,
        max_runs=options.max_runs,
        world_size=options.world_size if torchrun is None else torchrun.world_size,
    )
    if torchrun is not None:
        return _run_in_torchrun(torchrun, plan, folder, options)
    check_folder(folder.path, plan.manifest, options.resume)
    datasets = Datasets()
    check_data(plan, datasets)
    finished = folder.finished()
    pending = [job for job in plan.jobs if (job.row, job.seed) not in finished]
    num_kept = len(plan.jobs) - len(pending)
    for line in cost_of(pending, datasets, options.jobs) if pending else ():
        print(line, flush=True)
    with locked(folder.path):
        check_folder(folder.path, plan.manifest, options.resume)  # again: another process may have written meanwhile
        folder.begin(plan.manifest, warn)
        if num_kept:
            print(f"{shown(folder.path)}: runs that are finished and not repeated: {num_kept}", flush=True)
        run(plan, folder, datasets, options.jobs)
    results = folder.results()
    num, num_failed = len(plan.jobs), sum(results[job.row, job.seed]["status"] == FAILED for job in plan.jobs)
    print(f"finished: {num - num_failed} of {num}: ddpcore experiments compare {shown(folder.path)}")
    if options.plot is not None:
        _draw(compare([folder.path]), [options.plot])
    return 1 if num_failed else 0


def _run_in_torchrun(world: launch.World, plan: RunPlan, folder: Folder, options: RunOptions) -> int:
    """One of the ranks that torchrun has started, on one host or several: all rows run on all ranks."""
    others = sorted({job.row for job in plan.jobs if job.ranks != world.world_size or job.kill_rank is not None})
    if others or options.jobs > 1:
        what = f"row {others[0]} does not run on them" if others else "--jobs starts processes"
        raise ValueError(f"torchrun has started {world.world_size} ranks, and {what}: leave it out")
    check_data(plan, Datasets())
    with locked(folder.path) if world.rank == 0 else nullcontext():
        arguments, backend = (plan, folder, options.resume), backend_of(plan.jobs[0])
        launch.run(run_in_torchrun, arguments, world_size=world.world_size, backend=backend)
    if world.rank == 0:
        print(f"finished: ddpcore experiments compare {shown(folder.path)}")
    return 0


def _compare(options: CompareOptions) -> int:
    comparisons = compare(options.runs)
    plot, plots = options.plot, []
    if plot is not None:
        names = [f"{plot.stem}-{one['study']}" if len(comparisons) > 1 else plot.stem for one in comparisons]
        plots = [plot.with_stem(name) for name in names]
    for comparison in comparisons:
        for problem in comparison["problems"]:
            warn(f"{problem}: the rest is kept")
        print_comparison(comparison)
    _draw(comparisons, plots)
    if options.markdown is not None:
        files = [os.path.relpath(path.resolve(), options.markdown.resolve().parent) for path in plots]
        replace_file(options.markdown, markdown(comparisons, files).encode())
        print(f"wrote {shown(options.markdown)}")
    return 0


def _draw(comparisons: list[dict[str, Any]], plots: list[Path]) -> None:
    for comparison, path in zip(comparisons, plots, strict=False):
        plot_comparison(comparison, path, [run_label(run) for run in comparison["runs"]])
        print(f"wrote {shown(path)}")


COMMANDS: dict[str, tuple[type[Any], Callable[[Any], int]]] = {
    "list": (ListOptions, _list),
    "run": (RunOptions, _run),
    "compare": (CompareOptions, _compare),
    "landscape": (LandscapeOptions, landscapes),
}


def parse(argv: Sequence[str] | None) -> tuple[Callable[[Any], int], Any]:
    """The command that the first word names, and its options. ValueError, in one line: the words are no command."""
    parser = Parser(prog="ddpcore experiments", description="Published experiments: run them, compare them.")
    parser.example = RunOptions.EXAMPLE
    commands = parser.add_subparsers(dest="command", required=True, metavar=" | ".join(COMMANDS))
    for name, (options, _) in COMMANDS.items():
        help = (options.__doc__ or "").splitlines()[0]
        add_flags(commands.add_parser(name, help=help, description=help, allow_abbrev=False), options)
    given = vars(parser.parse_args(argv))
    chosen, command = COMMANDS[given.pop("command")]
    return command, chosen(**given)
