"""Ranks that die in a run that goes on, and the same run by virtual learners: ``elastic_ranks MAIN FILE ...``.

:func:`main` forks the ranks of the trials, so that torch is imported once, and
saves what the ranks that were left end with.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import torch
import torch._dynamo  # which the first optimizer of each forked rank would import, in seconds
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn

import ddpcore
from ddpcore import Connection, training
from ddpcore.comm.fabric import last_run
from ddpcore.comm.groups import own_client
from ddpcore.comm.membership import Change
from ddpcore.records.run import RECORD
from ddpcore.runtime.launch import World
from ddpcore.storage.json_lines import read_lines, write_lines
from ddpcore.strategies.compression import BFloat16
from ddpcore.strategies.learner import NonFinite
from ddpcore.testing.learners import Result, Scenario, SmallRun
from ddpcore.training import RunRecord, TrainConfig, loop, trainer
from ddpcore.training import __main__ as command
from ddpcore.training.config import merged
from helpers.forked import without_gloo
from helpers.lanes import in_lanes
from helpers.oracle import outer

GO = "ranks may join"  # a key of the store
TIMEOUT = 60.0  # seconds; of a trial
NUM_STEPS = 8
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ssgd": ddpcore.SSGD,
    "awc": lambda: ddpcore.DPSGD(ddpcore.RandomPair(seed=5)),
    "awc_ring": lambda: ddpcore.DPSGD(ddpcore.Ring()),
    "awc_hypercube": lambda: ddpcore.DPSGD(ddpcore.Hypercube()),
    "awc_nan": lambda: ddpcore.DPSGD(ddpcore.Complete()),
    "awc_bf16": lambda: ddpcore.DPSGD(ddpcore.OnePeerExponential(), compression=BFloat16()),
    "atc": lambda: ddpcore.DPSGD(ddpcore.OnePeerExponential(), order="adapt_then_combine"),
    "cta": lambda: ddpcore.DPSGD(ddpcore.RandomPair(seed=3), order="combine_then_adapt"),
    "stale": lambda: ddpcore.DPSGD(ddpcore.Ring(), staleness=1),
    "local_sgd": lambda: ddpcore.LocalSGD(period=2),
    "diloco": lambda: ddpcore.LocalSGD(period=2, outer=outer),
    "slowmo": lambda: ddpcore.SlowMo(ddpcore.DPSGD(ddpcore.RandomPair(seed=5)), period=3),
    "push_sum": lambda: ddpcore.PushSum(ddpcore.FromGraph(nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]))),
    "noisy": lambda: ddpcore.NoisySSGD(0.05, seed=3),
    "push_sum3": lambda: ddpcore.PushSum(ddpcore.OnePeerExponential()),
    "scaled": ddpcore.SSGD,
}
POLICIES = {
    "awc_ring": ddpcore.Policies(momentum="gossip"),
    "atc": ddpcore.Policies(momentum="average"),
    **dict.fromkeys(("awc_nan", "stale"), ddpcore.Policies(batch_norm="average")),  # ranks gather during an exchange
}
OPTIONS: dict[str, dict[str, Any]] = {
    "awc_nan": {"on_nonfinite": "quarantine"},  # in the sixth step, learner 3 has no number
    "scaled": {"scaler": torch.amp.GradScaler("cpu")},
}
OPTIMIZERS = {
    "awc": {"make_optimizer": partial(ddpcore.optim.FusedAdamW, lr=0.01)},  # it needs the count of its steps
    "noisy": {"make_optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9)},  # it gets whole rows with noise
}


class Trial(NamedTuple):
    """Who dies, at which operation, and whether it has published its row then."""

    strategy: str
    world_size: int
    deaths: tuple[tuple[int, int, bool], ...]  # rank, operation, whether after it has published its row
    transport: str = "shm"
    num_newcomers: int = 0  # ranks that join after the third step, or after the deaths
    newcomer: str = ""  # the strategy of a newcomer, if it is another one

    @property
    def num_steps(self) -> int:
        """Long enough to join."""
        return NUM_STEPS + 8 * (self.num_newcomers > 0)

    def __str__(self) -> str:
        deaths = "+".join(f"{rank}at{number}{'after' if late else 'before'}" for rank, number, late in self.deaths)
        joins = f"+{self.num_newcomers}" if self.num_newcomers else ""
        return f"{self.strategy}{self.newcomer}-{self.world_size}{joins}-{deaths}-{self.transport}"


class Ended(NamedTuple):
    """What one rank, or all virtual learners, end with."""

    result: Result
    changes: tuple[Change, ...]
    members: tuple[int, ...]
    said: list[str]
    slowest: float  # seconds of the longest step
    oldest: dict[int, int]  # by an operation in which a rank dies: the first one in progress when it begins
    first_step: int = 0  # of a rank that joined
    mine: int = 0  # the id of the rank
    found: Sequence[NonFinite] = ()


class ElasticRun(SmallRun):
    """A small run in which ranks die by their own hand, or virtual learners by a script."""

    def __init__(self, trial: Trial, group: dist.ProcessGroup | None = None, script: Sequence[Change] = ()) -> None:
        self._trial, self._script = trial, script
        transport = "auto" if group is None else trial.transport
        ids = [one for change in script for one in change.joined]
        self._rows = max([trial.world_size, *(one + 1 for one in ids)])  # of virtual learners, with those that join
        super().__init__(
            STRATEGIES[trial.strategy],
            trial.world_size if group is not None else self._rows,
            replace(
                Scenario(), batch_norm=trial.strategy in ("slowmo", "awc_nan"), **OPTIMIZERS.get(trial.strategy, {})
            ),
            group=group,
            connection=Connection(on_failure="shrink", transport=transport),
            policies=POLICIES.get(trial.strategy),
            **OPTIONS.get(trial.strategy, {}),
        )
        self.handle: Any = None
        self.slowest = 0.0
        self._first_step = 0
        self._oldest: dict[int, int] = {}

    def _start(self, seed: int) -> Any:
        started = super()._start(seed)
        self.handle = started[2]
        if self._is_real:
            self._plan_death()
        else:
            for one in range(self._trial.world_size, self._rows):
                self.handle.lose(one)
            self.handle.play(self._script)
        if self._trial.strategy in OPTIONS and 3 in self._held:
            weight = self.handle.models[3 - self._held[0]][0].weight
            weight.register_hook(lambda grad: grad * torch.nan if self.handle.learner.step == 5 else grad)
        return started

    def await_newcomer(self, step: int) -> None:
        """In the third step, or in the one after the deaths: wait until a rank asks to join."""
        num_dead = len(self._trial.deaths)
        comm = self.handle.comm
        if self._trial.num_newcomers and step == (6 if num_dead else 3):
            own_client(c10d._get_default_store()).set(GO, "1")
            while comm._fabric.roll.asked < self._trial.num_newcomers:
                time.sleep(0.02)

    def _plan_death(self) -> None:
        fabric = self.handle.comm._fabric
        begin, done = fabric.begin, fabric.done
        in_progress: set[int] = set()
        deaths = {number for _, number, _ in self._trial.deaths}
        mine = [death for death in self._trial.deaths if death[0] == self._rank]

        def begin_or_die(operation: Any) -> None:
            in_progress.add(operation.number)
            if operation.number in deaths:
                self._oldest[operation.number] = min(in_progress)
            late = [late for _, number, late in mine if number == operation.number]
            if late == [False]:
                os.kill(os.getpid(), signal.SIGKILL)
            begin(operation)
            if late == [True]:
                os.kill(os.getpid(), signal.SIGKILL)

        def done_and_noted(operation: Any) -> None:
            in_progress.discard(operation.number)
            done(operation)

        fabric.begin, fabric.done = begin_or_die, done_and_noted

    def ended(self, result: Result) -> Ended:
        """What this process ends with."""
        handle = self.handle
        members = handle.comm.membership.members
        times = (self.slowest, self._oldest, self._first_step)
        return Ended(result, handle.changes, members, [], *times, self._rank, handle.nonfinite)

    def _step(self, *args: Any) -> Tensor:
        if self._is_real:
            self.await_newcomer(args[0])
        began = time.monotonic()
        losses = super()._step(*args)
        self.slowest = max(self.slowest, time.monotonic() - began)
        return losses


class Newcomer(ElasticRun):
    """The part of a rank that joins."""

    def __init__(self, trial: Trial, store: dist.Store) -> None:
        super().__init__(trial, None)
        self._store, self._is_real = store, True
        for name in ("learners", "group", "vectorize", "scaler"):
            self._arguments.pop(name, None)
        self._arguments["connection"] = replace(self._arguments["connection"], transport=trial.transport)

    def run(self, num_steps: int = NUM_STEPS) -> Result:
        self._store.wait([GO])
        torch.manual_seed(99)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        if self._scenario.batch_norm:
            model.insert(1, nn.BatchNorm1d(7))
        optimizer = self._scenario.make_optimizer(model.parameters())
        make = STRATEGIES[self._trial.newcomer or self._trial.strategy]
        self.handle = ddpcore.join(model, optimizer, make(), self._store, **self._arguments)
        mine, first = self.handle.comm.member, self.handle.learner.step
        self._rank, self._held, self._first_step = mine, range(mine, mine + 1), first
        self._num_learners = mine + 1
        losses = [SmallRun._step(self, step, optimizer, self.handle) for step in range(first, num_steps)]
        return self._result(self.handle, torch.stack(losses))


def train(trial: Trial, group: dist.ProcessGroup | None = None, script: Sequence[Change] = ()) -> Ended:
    """Train to the end, as one rank of a group or as all virtual learners."""
    run = ElasticRun(trial, group, script)
    return run.ended(run.run(trial.num_steps))


def join(trial: Trial, store: dist.Store) -> Ended:
    """Join a run, and train to its end."""
    run = Newcomer(trial, store)
    return run.ended(run.run(trial.num_steps))


def first_operation(strategy: str) -> int:
    """An operation in the middle of a run, in which nothing is set up any more. SSGD has several buckets a step."""
    known = {"ssgd": 16, "local_sgd": 4, "diloco": 4, "atc": 9, "awc_ring": 9, "awc_nan": 10, "stale": 7}
    return known.get(strategy, 6)


NAMES = [name for name in STRATEGIES if name not in ("push_sum3", "awc_nan", "noisy", "scaled")]
TRIALS = [Trial(name, 4, ((2, first_operation(name), index % 2 == 1),)) for index, name in enumerate(NAMES)]
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
    *(Trial(name, 4, ((0, first_operation(name), False),), "pg") for name in ("cta", "push_sum")),
    Trial("atc", 5, ((0, 9, False), (4, 11, True)), "pg"),
    Trial("awc", 3, ((1, 8, False), (2, 9, False)), "pg"),
]
TRIALS += [Trial("awc_nan", 4, ((0, first_operation("awc_nan"), False),), transport) for transport in ("shm", "pg")]
JOINS = [
    *(Trial(name, 3, (), "shm", 1) for name in ("awc_ring", "atc", "ssgd", "noisy", "diloco", "slowmo", "push_sum3")),
    Trial("cta", 4, ((2, 6, False),), "shm", 1),
    Trial("awc", 4, ((0, 6, False),), "shm", 2),
    Trial("awc_bf16", 3, (), "pg", 1),
    Trial("local_sgd", 3, (), "pg", 1),
    Trial("atc", 4, ((1, 9, False),), "pg", 1),
    Trial("push_sum3", 4, ((2, 10, False),), "shm", 1),  # while the new one gets its state, which is of five learners
    Trial("awc_bf16", 4, ((2, 10, False),), "shm", 1),
]
REFUSED = [Trial("atc", 3, (), "shm", 1, "slowmo"), Trial("stale", 3, (), "pg", 1), Trial("scaled", 3, (), "shm", 1)]


def run_rank(trial: Trial, rank: int, folder: Path) -> None:
    """In the forked process, which ends here."""
    os.dup2(os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY), 1)
    os.dup2(1, 2)
    store = dist.FileStore(str(folder / "store"), trial.world_size)
    try:
        if rank >= trial.world_size:
            ended = join(trial, store)
        else:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=trial.world_size)
            ended = train(trial, dist.group.WORLD)
        torch.save(ended, folder / f"{rank}.pt")
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    sys.stdout.flush()
    time.sleep(0.3)  # a rank that ends must not be taken for a death
    os._exit(0)


def fork_and_wait(num: int, run: Callable[[int], None]) -> dict[int, int]:
    """Fork ranks that call ``run`` with their number. Returns how each ended, SIGXCPU if it took too long."""
    pids = []
    for rank in range(num):
        pids.append(os.fork())
        if pids[-1] == 0:
            run(rank)
            os._exit(0)
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
    return codes


WHOLE: dict[str, Any] = {
    "model": "mlp",
    "data": {"name": "digits", "batch_size": 80},
    "optimizer": {"lr": 0.3},
    "strategy": {"name": "dpsgd", "topology": "hypercube", "learners": 4, "on_failure": "shrink"},
    "run": {"epochs": 6, "keep_last": 9, "record_steps": True},
}


def run_whole(out: Path, num_ranks: int, *, resume: bool) -> tuple[dict[int, int], str]:
    """A whole run into a folder. Rank 0 is killed when it has written the second epoch, before the checkpoint."""
    out.mkdir(exist_ok=True)
    log, store_file = out.with_suffix(".log"), out.with_suffix(".store")

    def die_later(row: dict[str, Any]) -> None:
        if not resume and row["kind"] == "epoch" and row["epoch"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def run(rank: int) -> None:
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)
        os.dup2(1, 2)
        store = dist.FileStore(str(store_file), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        try:
            world = World(rank, num_ranks, rank, num_ranks)
            training.train(TrainConfig.from_dict(WHOLE), out=out, world=world, resume=resume, on_record=die_later)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    return fork_and_wait(num_ranks, run), log.read_text()


def cut_back(out: Path, copy: Path, step: int) -> None:
    """Copy a run as it was when it had written the checkpoint of a step."""
    shutil.copytree(out, copy)
    for path in (copy / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    (copy / "model.safetensors").unlink()
    rows = read_lines(copy / RECORD).rows
    write_lines(copy / RECORD, [row for row in rows if row["kind"] != "end"])


def run_trial(trial: Trial) -> list[Any]:
    """What each rank ends with: an :class:`Ended`, the number of the signal that ended it, or what it printed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes = fork_and_wait(trial.world_size + trial.num_newcomers, lambda rank: run_rank(trial, rank, folder))
        ended: list[Any] = []
        for rank in range(len(codes)):
            log = without_gloo((folder / f"{rank}.log").read_text())
            with suppress(FileNotFoundError):
                one = torch.load(folder / f"{rank}.pt", weights_only=False)
                ended.append(one._replace(said=log.splitlines()))
                continue
            ended.append(
                signal.SIGKILL if codes[rank] == -signal.SIGKILL else f"{codes[rank]} {log}" if codes[rank] else log
            )
        return ended


def main() -> None:
    torch.set_num_threads(1)
    torch.save(in_lanes({str(trial): trial for trial in [*TRIALS, *JOINS, *REFUSED]}, run_trial), sys.argv[1])


def run_joined(out: Path) -> tuple[dict[int, int], str]:
    """A whole run of three ranks: rank 0 is killed in the evaluation of the second epoch, and a new one joins."""
    out.mkdir()
    log, store_file = out.with_suffix(".log"), out.with_suffix(".store")
    config = TrainConfig.from_dict(
        merged(WHOLE, {"strategy": {"learners": 3, "topology": "ring"}, "data": {"batch_size": 60}})
    )

    found = trainer.evaluate

    def die_in_evaluation(*arguments: Any) -> Any:
        if len(RunRecord.read(out).epochs) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return found(*arguments)

    def on_record(row: dict[str, Any]) -> None:
        if row["kind"] == "epoch" and row["epoch"] == 3:
            run_of_store = last_run(c10d._get_default_store(), 1.0)
            while not run_of_store.add("joins", 0):
                time.sleep(0.02)

    def run(rank: int) -> None:
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)
        os.dup2(1, 2)
        try:
            if rank == 3:
                while not (out / "record.jsonl").exists() or len(RunRecord.read(out).epochs) < 3:
                    time.sleep(0.05)
                code = command.main(["--out", str(out), "--join"])
                sys.stdout.flush()
                os._exit(code)
            if rank == 0:
                trainer.evaluate = die_in_evaluation
            store = dist.FileStore(str(store_file), 3)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
            training.train(config, out=out, world=World(rank, 3, rank, 3), on_record=on_record)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    return fork_and_wait(4, run), log.read_text()


def run_ended(out: Path) -> tuple[dict[int, int], str]:
    """A whole run of five ranks. Three die in turn, each as the one that writes.

    Rank 0 dies before it writes the row of the first epoch, rank 1 before that of the end, and rank 2 after that.
    """
    out.mkdir()
    log, store_file = out.with_suffix(".log"), out.with_suffix(".store")
    parts = {"strategy": {"learners": 5, "topology": "ring"}, "data": {"batch_size": 100}}
    config = TrainConfig.from_dict(merged(WHOLE, {**parts, "run": {"epochs": 2, "flatness_samples": 50}}))
    write = loop.RunWriter.write

    def die(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def write_or_die(self: Any, row: dict[str, Any]) -> None:
        write(self, row) if row["kind"] != "epoch" else die()

    def on_record(row: dict[str, Any]) -> None:
        if row["kind"] == "end":
            die()

    def run(rank: int) -> None:
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)
        os.dup2(1, 2)
        if rank == 0:
            loop.RunWriter.write = write_or_die
        if rank == 1:
            loop.flatness_of = die
        try:
            store = dist.FileStore(str(store_file), 5)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=5)
            world = World(rank, 5, rank, 5)
            ended = training.train(config, out=out, world=world, on_record=on_record if rank == 2 else None)
            assert ended.final, "no last row"
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    return fork_and_wait(5, run), log.read_text()


def main_ended() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    torch.save(run_ended(out), out.with_suffix(".pt"))


def main_joined() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    torch.save(run_joined(out), out.with_suffix(".pt"))


def main_whole() -> None:
    """A run that loses a rank, and the same run resumed from its first checkpoint after that, by 3 ranks and by 4."""
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    found = [run_whole(out, 4, resume=False)]
    for num_ranks in (3, 4):
        copy = out.with_name(f"resumed{num_ranks}")
        cut_back(out, copy, int(sys.argv[2]))
        found.append(run_whole(copy, num_ranks, resume=True))
    torch.save(found, out.with_suffix(".pt"))


if __name__ == "__main__":
    from helpers import elastic_ranks  # what it saves can be loaded by this name

    getattr(elastic_ranks, sys.argv.pop(1))()
