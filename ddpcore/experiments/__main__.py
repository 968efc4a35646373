"""``python -m ddpcore.experiments list | run STUDY | compare RUNS...``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ddpcore.experiments import study
from ddpcore.experiments.command_line import CompareOptions, ListOptions, RunOptions, parse
from ddpcore.experiments.compare import compare
from ddpcore.experiments.folder import FAILED, Folder
from ddpcore.experiments.plan import Datasets, check_data, make_plan
from ddpcore.experiments.run import run
from ddpcore.report.experiments import markdown, print_comparison, run_label
from ddpcore.report.plot import check_plot, plot_comparison
from ddpcore.runtime import launch
from ddpcore.storage.files import locked, replace_file


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, or 1 if a run failed, 2 if the command is wrong, 130 if a signal stopped it."""
    try:
        options = parse(argv)
        commands: dict[type, Callable[[Any], int]] = {ListOptions: _list, RunOptions: _run, CompareOptions: _compare}
        return commands[type(options)](options)
    except (ValueError, OSError) as error:
        print(f"ddpcore.experiments: {error}", file=sys.stderr)
        return 2
    except launch.RankFailed as error:
        print(f"ddpcore.experiments: {str(error).splitlines()[-1]}: go on with --resume", file=sys.stderr)
        return 1
    except launch.Stopped as error:
        print(f"ddpcore.experiments: {str(error).replace('resume=True', '--resume')}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        return 130


def _list(options: ListOptions) -> int:
    if options.study is None:
        loaded = [study.load(name) for name in study.names()]
        headings = ("study", "rows", "question", "published in")
        cells = [(one.name, str(len(one.rows)), one.question, one.source) for one in loaded]
    else:
        headings, cells = ("row", "learners", "about", "published"), []
        for row in study.load(options.study).rows.values():
            learners = str(row.config("full").learners) + (" ranks" if row.ranks else "")
            published = ", ".join(f"{metric} {value:g}" for metric, value in row.published.items())
            cells.append((row.name, learners, row.about, published or "-"))
    table = Table(*headings, show_lines=True)
    for line in cells:
        table.add_row(*line)
    Console().print(table)
    return 0


def _run(options: RunOptions) -> int:
    if launch.torchrun_world() is not None:
        raise ValueError("a study starts its ranks itself: run it without torchrun")
    chosen = study.load(options.study)
    folder = Folder(options.out or Path("runs", chosen.name, options.scale))
    plan = make_plan(
        chosen,
        folder,
        rows=options.rows,
        scale=options.scale,
        overrides=options.overrides(),
        first_seed=options.seed,
        num_seeds=options.seeds,
        world_size=options.world_size,
    )
    folder.check(plan.manifest, options.resume)
    finished = folder.finished() if folder.path.exists() else set()
    folder.check_runs((job.row, job.seed, job.config) for job in plan.jobs if (job.row, job.seed) not in finished)
    datasets = Datasets()
    check_data(plan, datasets)
    with locked(folder.path):
        folder.check(plan.manifest, options.resume)  # again: another process may have written into it meanwhile
        folder.begin(plan.manifest)
        if finished:
            print(f"{len(finished)} runs of {folder.path} are finished and are left as they are", flush=True)
        run(plan, folder, datasets, options.jobs)
    mine = {(job.row, job.seed) for job in plan.jobs}
    failed = [result for key, result in folder.results().items() if key in mine and result["status"] == FAILED]
    print(
        f"{len(mine) - len(failed)} of {len(mine)} runs finished: python -m ddpcore.experiments compare {folder.path}"
    )
    return 1 if failed else 0


def _compare(options: CompareOptions) -> int:
    comparisons = compare(options.runs)
    plot, plots = options.plot, []
    if plot is not None:
        check_plot(plot)
        names = [f"{plot.stem}-{one['study']}" if len(comparisons) > 1 else plot.stem for one in comparisons]
        plots = [plot.with_stem(name) for name in names]
    for comparison in comparisons:
        print_comparison(comparison)
    for comparison, path in zip(comparisons, plots, strict=False):
        plot_comparison(comparison, path, [run_label(run) for run in comparison["runs"]])
    if options.markdown is not None:
        here = options.markdown.resolve().parent
        files = [os.path.relpath(path.resolve(), here) for path in plots]
        replace_file(options.markdown, markdown(comparisons, files).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
