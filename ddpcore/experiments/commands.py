"""The commands of ``ddpcore.experiments``: list, run, compare, landscape."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.table import Table

from ddpcore.display.table import cell_of, console_of
from ddpcore.experiments import study
from ddpcore.experiments.charts import plot_comparison
from ddpcore.experiments.command_line import CompareOptions, LandscapeOptions, ListOptions, RunOptions, parse
from ddpcore.experiments.compare import compare
from ddpcore.experiments.landscapes import landscapes
from ddpcore.experiments.plan import (
    Datasets,
    RunPlan,
    backend_of,
    check_data,
    check_folder,
    check_runs,
    cost_of,
    make_plan,
)
from ddpcore.experiments.run import run, run_in_torchrun
from ddpcore.experiments.tables import markdown, print_comparison, run_label
from ddpcore.records.study import FAILED, Folder
from ddpcore.runtime import launch
from ddpcore.storage.files import locked, replace_file
from ddpcore.storage.limits import shown
from ddpcore.training.config import DataConfig


def run_command(argv: Sequence[str] | None) -> int:
    """Run the command of these words, and return the exit code: 0, or 1 if a run failed.

    Raises:
        ValueError: the command is wrong.
    """
    commands: dict[type, Callable[[Any], int]] = {
        ListOptions: _list, RunOptions: _run, CompareOptions: _compare, LandscapeOptions: landscapes
    }  # fmt: skip
    options = parse(argv)
    return commands[type(options)](options)


def _list(options: ListOptions) -> int:
    if options.study is None:
        table = Table("study", "rows", "data", "question", "published in", show_lines=True)
        for one in map(study.find_study, study.STUDIES.names()):
            layers = [layer.get("data", {}) for row in one.rows.values() for layer in row.layers["full"]]
            names = {data if isinstance(data, str) else data.get("name", "") for data in layers} - {""}
            data = ", ".join(sorted(names)) or DataConfig().name
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
    finished = folder.finished()
    check_runs(job for job in plan.jobs if (job.row, job.seed) not in finished)
    datasets = Datasets()
    check_data(plan, datasets)
    pending = [job for job in plan.jobs if (job.row, job.seed) not in finished]
    for line in cost_of(pending, datasets) if pending else ():
        print(line, flush=True)
    with locked(folder.path):
        check_folder(folder.path, plan.manifest, options.resume)  # again: another process may have written meanwhile
        folder.begin(plan.manifest, _warn)
        if finished:
            print(f"{shown(folder.path)}: runs that are finished and not repeated: {len(finished)}", flush=True)
        run(plan, folder, datasets, options.jobs)
    results = folder.results()
    num_failed = sum(results[job.row, job.seed]["status"] == FAILED for job in plan.jobs)
    finished_now = f"finished: {len(plan.jobs) - num_failed} of {len(plan.jobs)}"
    print(f"{finished_now}: ddpcore experiments compare {shown(folder.path)}")
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

    def begin() -> set[tuple[str, int]]:
        check_folder(folder.path, plan.manifest, options.resume)
        folder.begin(plan.manifest, _warn)
        return folder.finished()

    with locked(folder.path) if world.rank == 0 else nullcontext():
        backend = backend_of(plan.jobs[0])
        launch.run(run_in_torchrun, (plan.jobs, begin, folder), world_size=world.world_size, backend=backend)
    if world.rank == 0:
        print(f"finished: ddpcore experiments compare {shown(folder.path)}")
    return 0


def _warn(line: str) -> None:
    print(f"ddpcore experiments: {line}", file=sys.stderr, flush=True)


def _compare(options: CompareOptions) -> int:
    comparisons = compare(options.runs)
    plot, plots = options.plot, []
    if plot is not None:
        names = [f"{plot.stem}-{one['study']}" if len(comparisons) > 1 else plot.stem for one in comparisons]
        plots = [plot.with_stem(name) for name in names]
    for comparison in comparisons:
        for problem in comparison["problems"]:
            _warn(f"{problem}: the rest is kept")
        print_comparison(comparison)
    _draw(comparisons, plots)
    if options.markdown is not None:
        here = options.markdown.resolve().parent
        files = [os.path.relpath(path.resolve(), here) for path in plots]
        replace_file(options.markdown, markdown(comparisons, files).encode())
    return 0


def _draw(comparisons: list[dict[str, Any]], plots: list[Path]) -> None:
    for comparison, path in zip(comparisons, plots, strict=False):
        plot_comparison(comparison, path, [run_label(run) for run in comparison["runs"]])
