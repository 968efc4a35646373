"""Runs the jobs of a study, one after another or in parallel. A job that fails does not stop the others."""

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import torch
import torch.distributed as dist

from ddpcore.experiments.metrics import curves_of, metrics_of
from ddpcore.experiments.plan import Datasets, Job, RunPlan, backend_of, check_folder, cost_of
from ddpcore.records.run import CHECKPOINTS, steps_of
from ddpcore.records.study import FAILED, FINISHED, Folder
from ddpcore.runtime import launch
from ddpcore.runtime.launch import StopSignal, World
from ddpcore.runtime.machine import keep_freed_memory
from ddpcore.storage.files import plain
from ddpcore.training import Interrupted, train
from ddpcore.training.build import LearnerPlacement
from ddpcore.training.loop import OnProgress

POLL_SECONDS = 0.002  # between two checks for the checkpoint after which a rank is killed


def run(plan: RunPlan, folder: Folder, datasets: Datasets, processes: int = 1) -> None:
    """Run the jobs that are not finished, first those without ranks. Write and print one result for each.

    The folder has its manifest. ``processes`` share the jobs without ranks, and the cores. launch.Stopped: a signal
    requested it; the current runs are saved and can be resumed. launch.RankFailed: one of several processes was killed;
    the others have ended.
    """
    finished = folder.finished()
    pending = [job for job in plan.jobs if (job.row, job.seed) not in finished]
    without_ranks = [job for job in pending if not job.ranks]
    processes = min(processes, len(without_ranks))
    if processes > 1:
        next_index = multiprocessing.get_context("spawn").Value("i", 0)
        launch.run(_run_share, (without_ranks, next_index, folder), world_size=processes, backend="none")
    else:
        _run_in_process(zip(range(len(without_ranks), 0, -1), without_ranks, strict=True), folder, datasets)
    worlds: dict[tuple[int, str], list[Job]] = {}
    for job in pending:
        if job.ranks:
            worlds.setdefault((job.ranks, backend_of(job)), []).append(job)
    for (ranks, backend), jobs in worlds.items():
        _run_ranks(jobs, ranks, backend, folder)


def _run_in_process(jobs: Iterable[tuple[int, Job]], folder: Folder, datasets: Datasets, processes: int = 1) -> None:
    """Run jobs, each with the number of jobs that no process has begun, itself among them."""

    def raise_if_asked(where: str) -> None:
        if stop.asked:
            raise Interrupted(f"stopped by {stop.name} {where}: go on with resume=True")

    with StopSignal() as stop:  # for a signal that comes after the last step of a run, which does not check again
        for left, job in jobs:
            raise_if_asked(f"before {job.row}")
            try:
                result = _train(job, None, datasets, _time_left(left, processes))
            except Interrupted:
                raise
            except Exception as error:  # the other jobs run in any case
                result = _failure(job, f"{type(error).__name__}: {error}")
            _finish(folder, result)
        raise_if_asked("after the last run of this process")


def _run_share(world: World, jobs: Sequence[Job], next_index: "Synchronized[int]", folder: Folder) -> None:
    """Run in each of several processes: always the next job that no other process has taken. Process i takes GPU i."""
    if torch.cuda.is_available():
        torch.cuda.set_device(world.rank % torch.cuda.device_count())

    def next_job() -> tuple[int, Job] | None:
        with next_index.get_lock():
            next_index.value += 1
            left = len(jobs) + 1 - next_index.value
            return (left, jobs[-left]) if left > 0 else None

    _run_in_process(iter(next_job, None), folder, Datasets(), world.world_size)


def _run_ranks(jobs: Sequence[Job], ranks: int, backend: str, folder: Folder) -> None:
    """Run all jobs on one group of ranks. When a job fails, it is recorded and a new group continues after it."""
    pending = list(jobs)
    while pending:
        try:
            launch.run(_work, (pending, folder), world_size=ranks, backend=backend)
        except launch.RankFailed as error:
            finished = folder.finished()
            pending = [job for job in pending if (job.row, job.seed) not in finished]
            if pending and str(error) == f"rank {pending[0].kill_rank} was ended by SIGKILL":
                pending[0] = replace(pending[0], kill_rank=None, recovered=(str(error),))
            elif pending:
                _finish(folder, _failure(pending[0], str(error)))
                del pending[0]
        else:
            return


def _work(world: World, jobs: Sequence[Job], folder: Folder) -> None:
    datasets = Datasets()
    for place, job in enumerate(jobs):
        done = threading.Event()
        if job.kill_rank == world.rank:
            threading.Thread(target=_kill_after_checkpoint, args=(job, done), daemon=True).start()
        result = _train(job, world, datasets, _time_left(len(jobs) - place))
        done.set()
        if world.rank == 0:
            _finish(folder, result)
        # No rank can fail in the next job before the result of this one is written.
        LearnerPlacement.of(job.config, world).barrier(f"the end of {job.row}")


def run_in_torchrun(world: World, plan: RunPlan, folder: Folder, resume: bool) -> None:
    """Run on each rank that torchrun has started. Rank 0 alone reads and writes the folder of the study."""
    news: list[Any] = [None]
    if world.rank == 0:
        try:
            check_folder(folder.path, plan.manifest, resume)
            folder.begin(plan.manifest, warn)
            news = [folder.finished()]
        except ValueError as error:
            news = [str(error)]
    dist.broadcast_object_list(news)
    if isinstance(news[0], str):
        raise ValueError(news[0])
    pending = [job for job in plan.jobs if (job.row, job.seed) not in news[0]]
    for line in cost_of(pending, Datasets()) if pending and world.rank == 0 else ():
        print(line, flush=True)
    _work(world, pending, folder)


def warn(line: str) -> None:
    """Print a line on standard error."""
    print(f"ddpcore experiments: {line}", file=sys.stderr, flush=True)


def _kill_after_checkpoint(job: Job, done: threading.Event) -> None:
    while not done.wait(POLL_SECONDS):
        if steps_of(job.path / CHECKPOINTS):
            os.kill(os.getpid(), signal.SIGKILL)


def _time_left(left: int, processes: int = 1) -> OnProgress:
    """A function that prints, from the time of the first steps, how long this run and the later ones take."""
    begun: list[tuple[float, int]] = []

    def say(step: int, num_steps: int) -> None:
        begun.append((time.perf_counter(), step))
        if len(begun) == 2 and left > 1:
            hours = (begun[1][0] - begun[0][0]) / (step - begun[0][1]) * num_steps * left / processes / 3600
            print(f"about {hours:.2f} h for {left} runs, if all take as long", flush=True)

    return say


def _train(job: Job, world: World | None, datasets: Datasets, on_progress: OnProgress) -> dict[str, Any]:
    """Train, from the last checkpoint if there is one, and return the result."""
    keep_freed_memory()
    dataset = datasets.of(LearnerPlacement.of(job.config, world))
    record = train(job.config, out=job.path, world=world, resume=True, dataset=dataset, on_progress=on_progress)
    parts = (record.header, *record.resumed)  # a resumed run may continue on another machine or commit
    return {
        **_heading(job),
        "status": FINISHED,
        "diverged": record.final["diverged"],
        "metrics": metrics_of(record, len(job.recovered)),
        "curves": curves_of(record),
        "total_seconds": record.final["total_seconds"],
        "cores": min(part["cores"] for part in parts),
        **{key: record.header.get(key) for key in ("ddpcore", "communication", "threads")},
        **{
            key: ", ".join(dict.fromkeys(part[key] for part in parts if part.get(key))) or None
            for key in ("device", "torch", "commit")
        },
    }


def _failure(job: Job, error: str) -> dict[str, Any]:
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["unknown"]
    return {**_heading(job), "status": FAILED, "diverged": False, "metrics": {}, "curves": {}, "error": lines[-1]}


def _heading(job: Job) -> dict[str, Any]:
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"row": job.row, "seed": job.seed, "place": job.place, "recovered": job.recovered, "date": date}


def _finish(folder: Folder, result: dict[str, Any]) -> None:
    """Write and print a result. Of a run that has finished, the model stays, and its checkpoints go."""
    folder.append(result)
    where = f"{result['row']}, seed {result['seed']}, {result['place']}"
    if result["status"] == FAILED:
        print(f"{where}: failed: {plain(result['error'])}", flush=True)
        return
    shutil.rmtree(folder.run_path(result["row"], result["seed"]) / CHECKPOINTS, ignore_errors=True)
    shown = {name: result["metrics"][name] for name in ("train_loss", "accuracy_pct")}
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if value is not None)
    print(f"{where}: {'diverged' if result['diverged'] else numbers}, {result['total_seconds']:.1f} s", flush=True)
