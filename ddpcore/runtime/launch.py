"""Starts ranks on one machine, or joins the ranks of torchrun. No other module reads environment variables.

The parent process hosts the rendezvous store, so the system chooses a free port. Store and ranks listen on loopback
only: other machines cannot reach them. If a rank dies, the others are ended; if the parent dies, even by SIGKILL, its
ranks end. So do ranks of torchrun whose agent dies.
"""

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 300.0  # that a living rank may let the others wait; rank 0 may be writing a checkpoint
MOST_SECONDS = 1e6  # of a timeout: what the backends can count
START_SECONDS = 60.0  # the least time for ranks to come up: they import torch, on a busy machine
WATCH_SECONDS = 1.0  # between two checks that torchrun's agent lives
GRACE_SECONDS = 1.0  # wait for the reports of ranks that fail together, so that the first cause is shown
KILL_SECONDS = 3.0  # between SIGTERM and SIGKILL
LOOPBACK = "127.0.0.1"
_watching = threading.Event()  # whether end_with_torchrun() has started its thread

before_exit: list[Callable[[], None]] = []
"""Functions that a rank calls before it ends, because it ends without the interpreter's clean-up."""


@dataclass(frozen=True)
class World:
    """The rank of a process and the number of ranks, in total and on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def num_hosts(self) -> int:
        """Machines with as many ranks as this one, at least one."""
        return -(-self.world_size // self.local_world_size)


class UsageError(ValueError):
    """The arguments do not allow to start or join the ranks; the message is one line."""


class RankFailed(Exception):
    """A rank failed. The message is its traceback, or the signal that ended it."""


class Stopped(Exception):
    """Raised by a worker that has saved its work after a signal; the message says what it saved."""


class StopSignal:
    """A context manager that records the first SIGINT or SIGTERM, and calls ``then``; a second has its previous effect.

    It records nothing outside the main thread, or for signals that the process ignores. A nested one inherits a signal
    that the outer one has received.
    """

    asked: bool = False  # whether a signal was received
    name: str = ""  # of the signal
    _innermost: "ClassVar[StopSignal | None]" = None

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self._then = then

    def __enter__(self) -> "StopSignal":
        self._before: dict[signal.Signals, Any] = {}
        self._outer: StopSignal | None = None
        if threading.current_thread() is not threading.main_thread():
            return self
        self._outer, StopSignal._innermost = StopSignal._innermost, self
        if self._outer is not None and self._outer.asked:
            self.asked, self.name = True, self._outer.name
            self._then()
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()
        if StopSignal._innermost is self:
            StopSignal._innermost = self._outer

    def pass_on(self) -> None:
        """Raise the signal again, after the context was left, unless the outer one has received it."""
        if self.asked and not (self._outer is not None and self._outer.asked):
            signal.raise_signal(signal.Signals[self.name])

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.asked, self.name = True, signal.Signals(number).name
        self._restore()
        self._then()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def torchrun_world(environment: Mapping[str, str] | None = None) -> World | None:
    """The world from torchrun's environment variables; None if torchrun did not start this process."""
    env = os.environ if environment is None else environment
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    try:
        rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
        return World(rank, size, int(env.get("LOCAL_RANK", rank)), int(env.get("LOCAL_WORLD_SIZE", size)))
    except ValueError as error:
        raise UsageError(f"RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE must be numbers ({error})") from None


def hosts_here() -> int:
    """Hosts of the ranks that torchrun has started, 1 without torchrun."""
    return 1 if (world := torchrun_world()) is None else world.num_hosts


def variables(names: Sequence[str]) -> dict[str, str | None]:
    """The values of environment variables; None for those that are not set."""
    return {name: os.environ.get(name) for name in names}


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_per_rank(local_world_size: int) -> int:
    """Compute threads of each rank: cores divided by ranks, at least one."""
    return max(1, num_cores() // local_world_size)


def check_timeout(seconds: float) -> None:
    """Raise ValueError unless ranks can wait for so long."""
    if not 0 < seconds <= MOST_SECONDS:
        raise ValueError(f"timeout is {seconds:g}: it must be above 0 and at most {MOST_SECONDS:.0f} seconds")


class _Rank(NamedTuple):
    process: BaseProcess
    reports: Connection

    @property
    def signal(self) -> str:
        """The name of the signal that ended it; empty if none did."""
        code = self.process.exitcode or 0
        return signal.Signals(-code).name if code < 0 else ""

    def report(self) -> tuple[float, bool, str] | None:
        """When it failed, whether it stopped after a signal, and its text. None without a report, or if it was read."""
        with suppress(EOFError):  # it ended without one
            if self.reports.poll():
                return self.reports.recv()
        return None


def run(
    worker: Callable[..., None],
    args: tuple[Any, ...],
    *,
    world_size: int,
    backend: str,
    timeout: float = TIMEOUT_SECONDS,
    on_failure: str = "raise",
    forks: bool = False,
) -> None:
    """Run ``worker(world, *args)`` on every rank.

    SIGINT and SIGTERM are forwarded to the ranks as SIGTERM, and this process waits for them: a worker may save its
    work. A second signal ends them. Under torchrun this process is one of the ranks.

    Args:
        worker: importable by name; it is called in every process, with ``args``, which are picklable.
        world_size: number of processes to start; torchrun must have started as many.
        backend: of the process group; ``none``: no process group; ``virtual``: the worker runs in this process.
        timeout: seconds that a call of the process group may wait for a rank.
        on_failure: ``raise``: the others are ended when a rank fails. ``shrink``: they go on, and this process says who
            failed. torchrun ends all ranks of its agent when one of them fails.
        forks: on a machine without GPUs, fork ranks from a server that has imported torch and its compiler, which takes
            each rank seconds. Only for a process that runs once, and a worker that saves nothing: a SIGTERM to all
            processes ends the server, and so the ranks. False: each rank imports torch itself.

    Raises:
        RankFailed: a rank failed (with ``shrink``: all of them), with its traceback. All ranks have ended.
        Stopped: the ranks stopped after a signal.
        UsageError, ValueError: torchrun started another number of ranks, or the timeout is out of range.
    """
    check_timeout(timeout)
    joined, run_rank = torchrun_world(), partial(_run_rank, worker, args, backend, timeout)
    if backend == "virtual":
        if joined is not None and joined.world_size > 1:
            raise UsageError("virtual learners live in one process: run without torchrun, or use --backend gloo")
        worker(World(), *args)
    elif joined is not None:
        if joined.world_size != world_size:
            raise UsageError(f"torchrun started {joined.world_size} ranks, not {world_size}: leave --world-size out")
        end_with_torchrun()
        run_rank(joined)
    else:
        _start(run_rank, world_size, on_failure, forks)


def _run_rank(
    worker: Callable[..., None], args: tuple[Any, ...], backend: str, timeout: float, world: World, **store: Any
) -> None:
    """Join the process group, by the store if there is one, else by torchrun's, and call the worker."""
    torch.set_num_threads(threads_per_rank(world.local_world_size))
    if backend == "nccl":
        torch.cuda.set_device(world.local_rank)
    if backend == "none":
        worker(world, *args)
        return
    seconds = max(timeout, START_SECONDS)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds), **store)
    except dist.DistStoreError as error:
        raise TimeoutError(f"a rank did not start within {seconds:g} s: see its output, or raise timeout") from error
    assert dist.group.WORLD is not None
    dist.group.WORLD.set_timeout(timedelta(seconds=timeout))
    worker(world, *args)
    dist.destroy_process_group()  # not after a failure: other ranks would fail before this one reports its error


def _start(run_rank: Callable[..., None], world_size: int, on_failure: str, forks: bool) -> None:
    listener = socket.create_server((LOOPBACK, 0))  # a TCPStore by itself would listen on every address
    port, descriptor = listener.getsockname()[1], listener.detach()
    store = dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    # The path of a server's socket must be short. It imports torch alone: its sys.path is not this process's.
    forks = forks and not torch.cuda.device_count() and len(tempfile.gettempdir()) <= 70
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    context.set_forkserver_preload(["torch._dynamo"])
    ranks: list[_Rank] = []
    try:
        for rank in range(world_size):
            receive, send = context.Pipe(duplex=False)
            world = World(rank, world_size, rank, world_size)
            process = context.Process(target=_child, args=(run_rank, world, store.port, send))
            process.start()
            send.close()
            ranks.append(_Rank(process, receive))

        def terminate() -> None:
            for rank in ranks:
                rank.process.terminate()

        with StopSignal(terminate) as stop:
            try:
                _wait(ranks, on_failure)
            except RankFailed:  # after a signal ranks may end in any way
                if not stop.asked:
                    raise
        stop.pass_on()
    finally:
        _end(ranks)


def _child(run_rank: Callable[..., None], world: World, port: int, report: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C signals the whole process group; the parent forwards it
    if (parent := multiprocessing.parent_process()) is not None:
        _end_after(parent.join)
    for library in ("GLOO", "NCCL"):  # else they listen on the address of the machine's name, or of a network card
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    try:
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=START_SECONDS))
        run_rank(world, store=store, rank=world.rank, world_size=world.world_size)
        code = 0
    except BaseException as error:
        stopped = isinstance(error, Stopped)
        report.send((time.time(), stopped, str(error) if stopped else traceback.format_exc()))
        report.close()
        code = 1
    # Exit without the interpreter's clean-up: after a failure it would wait for ranks that are about to be ended, and
    # after a success threads that outlive the process group sometimes abort the process.
    sys.stdout.flush()
    sys.stderr.flush()
    for callback in before_exit:
        callback()
    os._exit(code)


def _end_after(wait_for: Callable[[], None], words: bytes = b"") -> None:
    """End this process when a function returns, in a thread."""

    def watch() -> None:
        wait_for()
        with suppress(OSError):  # standard error may be a pipe to the process that has ended
            os.write(2, words)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="ddpcore-end-watch").start()


def end_with_torchrun() -> None:
    """End a process of torchrun soon after its agent has died, even by SIGKILL. UsageError: it has died already.

    Without this, the ranks of the dead agent would train on beside the ranks of the next one.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or _watching.is_set():
        return
    agent = os.getppid()
    if agent == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes():  # init inherits the ranks of a dead agent
        raise UsageError("torchrun's agent has died: start the ranks again")

    def agent_dies() -> None:
        while os.getppid() == agent:
            time.sleep(WATCH_SECONDS)

    _watching.set()
    _end_after(agent_dies, b"ddpcore: torchrun's agent has died, so its ranks end\n")


def check_agents() -> None:
    """Raise UsageError if ranks of torchrun cannot go on without each other: its agent ends all when one dies."""
    world = torchrun_world() if "TORCHELASTIC_RUN_ID" in os.environ else None
    if world is not None and world.local_world_size == world.world_size > 1:
        what = "on_failure='shrink' under one torchrun: it ends all its ranks when one dies"
        advice = "start a torchrun for each rank with --nproc-per-node 1, see docs/multihost.md"
        raise UsageError(f"{what}, so {advice}, or start ranks with --world-size")


def _wait(ranks: Sequence[_Rank], on_failure: str) -> None:
    """Wait for all ranks. Raise RankFailed as soon as one fails (``shrink``: if all do); Stopped after all stopped."""
    running = dict(enumerate(ranks))
    cause: Exception | None = None
    while running and (cause is None or isinstance(cause, Stopped)):  # ranks that stop get time to save their work
        wait([rank.process.sentinel for rank in running.values()])
        for number in [number for number, rank in running.items() if rank.process.exitcode is not None]:
            died = running.pop(number)
            is_last = not running and all(rank.process.exitcode for rank in ranks)
            if died.process.exitcode == 0:
                continue
            if on_failure == "shrink" and not is_last:
                stopped = _go_on_without(number, died)
                cause = cause or stopped
            elif cause is None:
                cause = _first_cause(ranks, number)
    if cause is not None:
        raise cause


def _go_on_without(number: int, died: _Rank) -> Stopped | None:
    """Say that the others go on without a rank. If it stopped after a signal, as all others do, return that."""
    how = f"was ended by {died.signal}" if died.signal else "failed"
    if (report := died.report()) is not None:
        _, stopped, text = report
        if stopped:
            return Stopped(text)
        how = f"failed ({text.rstrip().splitlines()[-1]})"
    print(f"ddpcore: rank {number} {how}: the others go on", file=sys.stderr, flush=True)
    return None


def _first_cause(ranks: Sequence[_Rank], died: int) -> Exception:
    time.sleep(GRACE_SECONDS)
    for number, rank in enumerate(ranks):  # a killed rank is the cause: the others only lost their connection to it
        if rank.signal:
            return RankFailed(f"rank {number} was ended by {rank.signal}")
    reports = [(report[0], number, *report[1:]) for number, rank in enumerate(ranks) if (report := rank.report())]
    if reports:
        _, first, stopped, text = min(reports)
        return Stopped(text) if stopped else RankFailed(f"rank {first} failed:\n{text.rstrip()}")
    return RankFailed(f"rank {died} ended with exit code {ranks[died].process.exitcode} and left no traceback")


def _end(ranks: Sequence[_Rank]) -> None:
    """End the ranks that still run: SIGTERM, then SIGKILL after KILL_SECONDS."""
    processes = [rank.process for rank in ranks]
    for process in processes:
        process.terminate()  # does nothing to one that has ended
    deadline = time.monotonic() + KILL_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
