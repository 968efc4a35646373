"""Ranks that die in a run that goes on, and the same run by virtual learners.

:func:`main` forks the ranks of one trial after another, so that torch is imported once, and
saves what the ranks that were left end with.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import torch
import torch._dynamo  # which the first optimizer of each forked rank would import, in seconds
import torch.distributed as dist
from torch import Tensor

import ddpcore
from ddpcore.comm.membership import Change
from ddpcore.strategies.compression import BFloat16
from ddpcore.testing.learners import Result, Scenario, SmallRun
from helpers.forked import without_gloo
from helpers.oracle import outer

TIMEOUT = 30.0  # seconds; of a trial
NUM_STEPS = 8
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ssgd": ddpcore.SSGD,
    "awc": lambda: ddpcore.DPSGD(ddpcore.RandomPair(seed=5)),
    "awc_ring": lambda: ddpcore.DPSGD(ddpcore.Ring()),
    "awc_hypercube": lambda: ddpcore.DPSGD(ddpcore.Hypercube()),
    "awc_bf16": lambda: ddpcore.DPSGD(ddpcore.OnePeerExponential(), compression=BFloat16()),
    "atc": lambda: ddpcore.DPSGD(ddpcore.OnePeerExponential(), order="adapt_then_combine"),
    "cta": lambda: ddpcore.DPSGD(ddpcore.RandomPair(seed=3), order="combine_then_adapt"),
    "stale": lambda: ddpcore.DPSGD(ddpcore.Ring(), staleness=1),
    "local_sgd": lambda: ddpcore.LocalSGD(period=2),
    "diloco": lambda: ddpcore.LocalSGD(period=2, outer=outer),
    "slowmo": lambda: ddpcore.SlowMo(ddpcore.DPSGD(ddpcore.RandomPair(seed=5)), period=3),
    "push_sum": lambda: ddpcore.PushSum(ddpcore.FromGraph(nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]))),
}
POLICIES = {"awc_ring": ddpcore.Policies(momentum="gossip"), "atc": ddpcore.Policies(momentum="average")}


class Trial(NamedTuple):
    """Who dies, at which operation, and whether it has published its row then."""

    strategy: str
    world_size: int
    deaths: tuple[tuple[int, int, bool], ...]  # rank, operation, whether after it has published its row
    transport: str = "shm"

    def __str__(self) -> str:
        deaths = "+".join(
            f"{rank}at{operation}{'after' if late else 'before'}" for rank, operation, late in self.deaths
        )
        return f"{self.strategy}-{self.world_size}-{deaths}-{self.transport}"


class Ended(NamedTuple):
    """What one rank, or all virtual learners, end with."""

    result: Result
    changes: tuple[Change, ...]
    members: tuple[int, ...]
    warned: list[str]
    slowest: float  # seconds of the longest step


class ElasticRun(SmallRun):
    """A small run in which ranks die by their own hand, or virtual learners by a script."""

    def __init__(self, trial: Trial, group: dist.ProcessGroup | None = None, script: Sequence[Change] = ()) -> None:
        self._trial, self._script = trial, script
        options: dict[str, Any] = {"on_failure": "shrink", "policies": POLICIES.get(trial.strategy)}
        if group is not None:
            options["transport"] = trial.transport
        super().__init__(
            STRATEGIES[trial.strategy],
            trial.world_size,
            replace(Scenario(), batch_norm=trial.strategy == "slowmo"),
            group=group,
            options=options,
        )
        self.handle: Any = None
        self.slowest = 0.0

    def _start(self, seed: int) -> Any:
        started = super()._start(seed)
        self.handle = started[2]
        if self._is_real:
            self._plan_death()
        else:
            self.handle.play(self._script)
        return started

    def _plan_death(self) -> None:
        fabric = self.handle.comm._fabric
        begin = fabric.begin
        mine = [death for death in self._trial.deaths if death[0] == self._rank]

        def begin_or_die(operation: Any) -> None:
            late = [late for _, number, late in mine if number == operation.number]
            if late == [False]:
                os.kill(os.getpid(), signal.SIGKILL)
            begin(operation)
            if late == [True]:
                os.kill(os.getpid(), signal.SIGKILL)

        fabric.begin = begin_or_die

    def _step(self, *args: Any) -> Tensor:
        began = time.monotonic()
        losses = super()._step(*args)
        self.slowest = max(self.slowest, time.monotonic() - began)
        return losses


def train(trial: Trial, group: dist.ProcessGroup | None = None, script: Sequence[Change] = ()) -> Ended:
    """Train to the end, as one rank of a group or as all virtual learners."""
    run = ElasticRun(trial, group, script)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run.run(NUM_STEPS)
    handle, warned = run.handle, [str(one.message) for one in caught if one.category is RuntimeWarning]
    return Ended(result, handle.changes, handle.comm.membership.members, warned, run.slowest)


STRATEGY_NAMES = tuple(STRATEGIES)


def first_operation(strategy: str) -> int:
    """An operation in the middle of a run, in which nothing is set up any more. SSGD has several buckets a step."""
    return {"ssgd": 16, "local_sgd": 4, "diloco": 4, "atc": 9, "awc_ring": 9}.get(strategy, 6)


TRIALS = [Trial(name, 4, ((2, first_operation(name), late),)) for name in STRATEGIES for late in (False, True)]
TRIALS += [
    Trial("awc", 4, ((0, 6, False),)),
    Trial("awc", 5, ((1, 6, False), (3, 6, True))),
    Trial("awc_ring", 5, ((0, 8, False), (4, 11, True))),
    Trial("atc", 4, ((0, 9, False), (3, 9, False))),
    Trial("ssgd", 4, ((3, 15, False), (0, 18, True))),
    Trial("awc", 3, ((1, 8, False), (2, 9, False))),  # one is left: an error
]
TRIALS += [  # over gloo, where messages of a rank that dies may or may not arrive
    *(Trial(name, 4, ((2, first_operation(name), True),), "pg") for name in ("ssgd", "awc_bf16", "stale", "diloco")),
    *(Trial(name, 4, ((0, first_operation(name), False),), "pg") for name in ("awc_hypercube", "cta", "push_sum")),
    Trial("awc", 5, ((1, 6, False), (3, 6, True)), "pg"),
    Trial("atc", 5, ((0, 9, False), (4, 11, True)), "pg"),
    Trial("awc", 3, ((1, 8, False), (2, 9, False)), "pg"),
]


def run_rank(trial: Trial, rank: int, folder: Path) -> None:
    """In the forked process, which ends here."""
    os.dup2(os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY), 1)
    os.dup2(1, 2)
    store = dist.FileStore(str(folder / "store"), trial.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=trial.world_size)
    try:
        torch.save(train(trial, dist.group.WORLD), folder / f"{rank}.pt")
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    sys.stdout.flush()
    time.sleep(0.3)  # a rank that ends must not be taken for a death
    os._exit(0)


def run_trial(trial: Trial) -> list[Any]:
    """What each rank ends with: an :class:`Ended`, the number of the signal that ended it, or what it printed."""
    with tempfile.TemporaryDirectory() as name:
        folder, pids = Path(name), []
        for rank in range(trial.world_size):
            pids.append(os.fork())
            if pids[-1] == 0:
                run_rank(trial, rank, folder)
        deadline = time.monotonic() + TIMEOUT
        codes: dict[int, int] = {}
        while len(codes) < len(pids):
            for rank, pid in enumerate(pids):
                if rank in codes:
                    continue
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGXCPU)
                found, status = os.waitpid(pid, 0 if time.monotonic() > deadline else os.WNOHANG)
                if found:
                    codes[rank] = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        ended: list[Any] = []
        for rank in range(trial.world_size):
            with suppress(FileNotFoundError):
                ended.append(torch.load(folder / f"{rank}.pt", weights_only=False))
                continue
            log = without_gloo((folder / f"{rank}.log").read_text())
            ended.append(-codes[rank] if codes[rank] < 0 and not log else log)
        return ended


def main() -> None:
    torch.set_num_threads(1)
    torch.save({str(trial): run_trial(trial) for trial in TRIALS}, sys.argv[1])
