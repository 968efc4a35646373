"""Runs the jobs of a study: one after another or side by side, each into its folder, whatever becomes of the others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import torch.distributed as dist

from ddpcore import launch
from ddpcore.allocator import keep_freed_memory
from ddpcore.engine import Interrupted, RunRecord, train
from ddpcore.engine.build import Place
from ddpcore.engine.checkpoint import Checkpoints
from ddpcore.engine.signals import Listener
from ddpcore.experiments import hosts
from ddpcore.experiments.folder import FAILED, FINISHED, Folder
from ddpcore.experiments.plan import Datasets, Job, Plan, backend_of
from ddpcore.experiments.results import curves_of, metrics_of
from ddpcore.launch import World

POLL_SECONDS = 0.002  # between two looks for the checkpoint after which a rank is to die


def run(plan: Plan, folder: Folder, datasets: Datasets, processes: int = 1) -> None:
    """Run what is not finished yet, those without ranks first, and write and print one result for each.

    Args:
        plan: whose data were checked.
        folder: whose manifest is written.
        datasets: of this process.
        processes: that share the runs without ranks, and the cores; a run is one process's.

    Raises:
        launch.Stopped: a signal asked to stop; the runs at hand are saved, and resuming goes on with them.
        launch.RankFailed: one of several processes did not end by itself, and ended the others.
    """
    finished = folder.finished()
    pending = [job for job in plan.jobs if (job.row, job.seed) not in finished]
    alone = [job for job in pending if not job.ranks]
    processes = min(processes, len(alone))
    if processes > 1:
        turn = multiprocessing.get_context("spawn").Value("i", 0)
        launch.run(_run_share, (alone, turn, folder), world_size=processes, backend="none")
    else:
        _run_alone(alone, folder, datasets)
    pending = [_placed(job) for job in pending if job.ranks]
    for ranks, apart, backend in dict.fromkeys((job.ranks, job.apart, backend_of(job)) for job in pending):
        start = hosts.run if apart else partial(launch.run, backend=backend)
        alike = [job for job in pending if (job.ranks, job.apart, backend_of(job)) == (ranks, apart, backend)]
        _run_ranks(alike, ranks, start, folder)


@cache
def _why_not_apart() -> str:
    try:
        hosts.check()
    except hosts.NotPermitted as error:
        print(f"hosts are processes of this machine, not network namespaces: {error}", file=sys.stderr, flush=True)
        return str(error)
    return ""


def _placed(job: Job) -> Job:
    """The job with its hosts in namespaces, where that can be: over gloo, where they may be made."""
    possible = job.hosts == hosts.NUM_HOSTS and backend_of(job) == "gloo" and not _why_not_apart()
    return replace(job, apart=possible)


def _run_alone(jobs: Iterable[Job], folder: Folder, datasets: Datasets) -> None:
    with Listener() as listener:  # for a signal that a run was too far to hear
        for job in jobs:
            _heed(listener, f"before {job.row}")
            _conclude(folder, _run_here(job, datasets))
        _heed(listener, "after the last run of this process")


def _heed(listener: Listener, where: str) -> None:
    if listener.asked:
        raise Interrupted(f"stopped by {listener.name} {where}: go on with resume=True")


def _run_share(world: World, jobs: Sequence[Job], turn: Synchronized[int], folder: Folder) -> None:
    """What each of several processes does: the next run that no other one has taken."""

    def taken() -> Iterator[Job]:
        while True:
            with turn.get_lock():
                index = turn.value
                turn.value += 1
            if index >= len(jobs):
                return
            yield jobs[index]

    _run_alone(taken(), folder, Datasets())


def _run_here(job: Job, datasets: Datasets) -> dict[str, Any]:
    try:
        return _train(job, None, datasets)
    except Interrupted:
        raise
    except Exception as error:  # whatever it is, the rows after this one are run
        return _failure(job, f"{type(error).__name__}: {error}")


def _run_ranks(jobs: Sequence[Job], ranks: int, start: Callable[..., None], folder: Folder) -> None:
    """All jobs in one world of ranks; a job that ends the world is noted, and a new world goes on after it."""
    pending = list(jobs)
    while pending:
        try:
            start(_work, (pending, folder), world_size=ranks)
        except launch.RankFailed as error:
            finished = folder.finished()
            pending = [job for job in pending if (job.row, job.seed) not in finished]
            if pending and str(error) == f"rank {pending[0].kill_rank} was ended by SIGKILL":
                pending[0] = replace(pending[0], kill_rank=None, recovered=(str(error),))
            elif pending:
                _conclude(folder, _failure(pending[0], str(error)))
                del pending[0]
        else:
            return


def _work(world: World, jobs: Sequence[Job], folder: Folder) -> None:
    """What each rank does."""
    datasets = Datasets()
    for job in jobs:
        done = threading.Event()
        if job.kill_rank == world.rank:
            threading.Thread(target=_die_after_checkpoint, args=(job, done), daemon=True).start()
        result = _train(job, world, datasets)
        done.set()
        if world.rank == 0:
            _conclude(folder, result)
        dist.barrier()  # no rank can fail in the next job before this one's result is written


def _die_after_checkpoint(job: Job, done: threading.Event) -> None:
    checkpoints = Checkpoints(folder=job.path / "checkpoints", config={})
    while not done.wait(POLL_SECONDS):
        if checkpoints.steps():
            os.kill(os.getpid(), signal.SIGKILL)


def _train(job: Job, world: World | None, datasets: Datasets) -> dict[str, Any]:
    """A run, from its checkpoint where there is one, and its result."""
    keep_freed_memory()
    dataset = datasets.of(Place.of(job.config, world))
    record = train(job.config, out=job.path, world=world, resume=True, dataset=dataset)
    return {
        **_about(job),
        "status": FINISHED,
        "diverged": record.final["diverged"],
        "metrics": metrics_of(record, len(job.recovered)),
        "curves": curves_of(record),
        "total_seconds": record.final["total_seconds"],
        **{key: record.header[key] for key in ("cores", "ddpcore", "communication")},
        **{key: _all_of(record, key) for key in ("device", "torch", "commit")},
    }


def _all_of(record: RunRecord, key: str) -> str | None:
    """What the run said when it began, and each time that it went on, where that differs."""
    return ", ".join(dict.fromkeys(row[key] for row in (record.header, *record.resumed) if row.get(key))) or None


def _failure(job: Job, error: str) -> dict[str, Any]:
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return {
        **_about(job),
        "status": FAILED,
        "diverged": False,
        "metrics": {},
        "curves": {},
        "error": lines[-1] if lines else "unknown",
    }


def _about(job: Job) -> dict[str, Any]:
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"row": job.row, "seed": job.seed, "place": job.place, "recovered": job.recovered, "date": date}


def _conclude(folder: Folder, result: dict[str, Any]) -> None:
    folder.append(result)
    _say(result)


def _say(result: dict[str, Any]) -> None:
    where = f"{result['row']}, seed {result['seed']}, {result['place']}"
    if result["status"] == FAILED:
        print(f"{where}: failed: {result['error']}", flush=True)
        return
    shown = {name: result["metrics"][name] for name in ("train_loss", "accuracy_pct")}
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if value is not None)
    ended = "diverged" if result["diverged"] else numbers
    print(f"{where}: {ended}, {result['total_seconds']:.1f} s", flush=True)
