"""``python -m ddpcore.experiments list | run STUDY | compare RUNS...``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ddpcore import launch
from ddpcore.engine.files import locked, replace_file
from ddpcore.experiments import study
from ddpcore.experiments.command_line import CompareOptions, ListOptions, RunOptions, parse
from ddpcore.experiments.compare import compare
from ddpcore.experiments.folder import FAILED, Folder
from ddpcore.experiments.plan import Datasets, check_data, make_plan
from ddpcore.experiments.run import run
from ddpcore.report.experiments import markdown, print_comparison, run_label
from ddpcore.report.plot import check_plot, plot_comparison


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 where a run failed; 2 where the command cannot be run as it stands; 130 where it was stopped."""
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
    out = Console()
    table = Table(show_lines=True)
    if options.study is None:
        for heading in ("study", "rows", "question", "published in"):
            table.add_column(heading)
        for name in study.names():
            known = study.load(name)
            table.add_row(name, str(len(known.rows)), known.question, known.source)
    else:
        for heading in ("row", "learners", "about", "published"):
            table.add_column(heading)
        for row in study.load(options.study).rows.values():
            learners = str(row.config("full").learners) + (" ranks" if row.ranks else "")
            published = ", ".join(f"{metric} {value:g}" for metric, value in row.published.items())
            table.add_row(row.name, learners, row.about, published or "-")
    out.print(table)
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
        folder.check(plan.manifest, options.resume)  # again: from here on nobody else writes into it
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
    labels = [[run_label(one) for one in comparison["runs"]] for comparison in comparisons]
    plots: list[Path] = []
    if options.plot is not None:
        check_plot(options.plot)
        several = len(comparisons) > 1
        plots = [
            options.plot.with_stem(f"{options.plot.stem}-{one['study']}") if several else options.plot
            for one in comparisons
        ]
    for comparison in comparisons:
        print_comparison(comparison)
    for comparison, path, names in zip(comparisons, plots, labels, strict=False):
        plot_comparison(comparison, path, names)
    if options.markdown is not None:
        here = options.markdown.resolve().parent
        files = [os.path.relpath(path.resolve(), here) for path in plots]
        replace_file(options.markdown, markdown(comparisons, files).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
