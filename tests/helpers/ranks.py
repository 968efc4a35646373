"""Starts real gloo ranks for a test: one process a rank, each running a script of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helpers import forked

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIMIT = 900.0  # seconds, of a run that hangs; on a busy machine a good one takes minutes


def environment() -> dict[str, str]:
    """This environment for a child: this checkout's package, loopback only, one thread, no launcher's variables."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    child = {name: value for name, value in os.environ.items() if name not in dropped}
    path = os.pathsep.join([str(ROOT), str(HERE.parent), child.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return child | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def names_in_shared_memory() -> set[str]:
    """Without semaphores: other tests that run now have some."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def python(*words: object, cwd: Path, timeout: float = LIMIT, **more: str) -> subprocess.CompletedProcess[str]:
    """``python WORDS`` as a process of its own, without the seconds of an import (:mod:`forked`)."""
    return forked.run([*map(str, words)], cwd=cwd, env=environment() | more, timeout=timeout)


def succeeds(*words: object) -> None:
    """Run ``python WORDS`` as :func:`python` does, in this folder, and require that it succeeds."""
    done = python(*words, cwd=Path.cwd())
    assert done.returncode == 0, done.stdout + done.stderr


def torchrun(words: Sequence[object], cwd: Path, num: int = 2) -> subprocess.CompletedProcess[str]:
    """``torchrun WORDS`` with ranks in new interpreters, which it starts; it is forked itself, as by :func:`python`."""
    return python("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}", *words, cwd=cwd)


class Trials(dict[str, list[tuple[int, str]]]):
    """The status and the output of each rank in a trial of a script, by the trial's name. A trial runs when asked for.

    Args:
        script: of this folder: ``SCRIPT FILE NAME`` runs one trial, as in ``shared_memory_ranks``, and without a name
            all, several at the same time.
        folder: for files, which exists.
        all_at_once: whether all run when the first one is asked for.
        more: variables of the environment.
    """

    def __init__(self, script: str, folder: Path, *, all_at_once: bool = False, **more: str) -> None:
        super().__init__()
        self._script, self._folder, self._env = script, folder, environment() | more
        self._all_at_once = all_at_once

    def __missing__(self, name: str) -> list[tuple[int, str]]:
        parent = forked.imported(f"import helpers.{self._script}", environment())
        logs, path = log_folder(self._folder, len(self)), self._folder / f"{len(self)}.pt"
        words = ["-m", f"helpers.{self._script}", str(path), *([] if self._all_at_once else [name])]
        process = parent.start(words, logs, self._env, self._folder)
        process.join(LIMIT)
        code = process.exitcode
        process.kill()
        assert code == 0, f"{name}: exit code {code}\n{''.join(forked.output(logs))}"
        self.update(torch.load(path))
        return self[name]


def run(script: str, world_size: int, timeout: float = LIMIT, more: Sequence[Sequence[object]] = ()) -> list[Any]:
    """What ``script`` saves on each rank. A rank that fails, or a run that lasts too long, is a RuntimeError.

    ``more`` are further words for each rank. What the script imports is imported once, before the ranks are forked.
    """
    parent = forked.imported(f"import helpers.{script}", environment())
    with tempfile.TemporaryDirectory() as name:
        folder, ranks = Path(name), []
        for rank in range(world_size):
            words = ["-m", f"helpers.{script}", name, str(world_size), str(rank), *map(str, more[rank] if more else ())]
            ranks.append(parent.start(words, log_folder(folder, rank), environment(), Path.cwd()))
        try:
            deadline = time.monotonic() + timeout
            while any(rank.exitcode is None for rank in ranks) and not any(rank.exitcode for rank in ranks):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        finally:
            time.sleep(0.5 if any(rank.exitcode for rank in ranks) else 0)  # ranks that fail together say so
            codes = [rank.exitcode for rank in ranks]
            for rank in ranks:
                rank.kill()
                rank.join()
        if any(code != 0 for code in codes):
            logs = ["".join(forked.output(log_folder(folder, rank))) for rank in range(world_size)]
            output = "".join(f"--- rank {rank}: {code}\n{logs[rank]}" for rank, code in enumerate(codes))
            raise RuntimeError(f"{script}: exit codes {codes} (None: still running after {timeout} s)\n{output}")
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def as_torchrun(
    words: Sequence[object], cwd: Path, num: int = 2, start: Callable[..., Any] = forked.start
) -> list[subprocess.CompletedProcess[str]]:
    """Each rank of ``python WORDS``, with torchrun's variables and without the seconds that torchrun takes.

    ``start`` may be that of a process with imports.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(num)}
    shared |= {"LOCAL_WORLD_SIZE": str(num), "GROUP_RANK": "0"}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "test"}
    command, started = [*map(str, words)], []
    with tempfile.TemporaryDirectory() as name:
        logs = [log_folder(Path(name), rank) for rank in range(num)]
        for rank in range(num):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(start(command, logs[rank], environment() | shared | own, cwd))
        deadline = time.monotonic() + LIMIT
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in started]
        for process in started:
            process.kill()
            process.join()
        if None in codes:
            raise subprocess.TimeoutExpired(command, LIMIT, repr([forked.output(log) for log in logs]))
        pairs = zip(codes, logs, strict=True)
        return [subprocess.CompletedProcess(command, code, *forked.output(log)) for code, log in pairs]


def printed(ranks: Sequence[subprocess.CompletedProcess[str]]) -> list[str]:
    """What each of these printed, which must have succeeded."""
    assert not any(rank.returncode for rank in ranks), [(rank.stdout, rank.stderr) for rank in ranks]
    return [rank.stdout for rank in ranks]


def has_slow_items(request: Any) -> bool:
    """Whether tests of the file that are marked slow are selected, so that their ranks have more to do.

    ``request`` is that of a fixture.
    """
    here = [item for item in request.session.items if item.path == request.path]
    return any(item.get_closest_marker("slow") for item in here)


def log_folder(folder: Path, rank: int) -> Path:
    """Where a rank of :func:`run` leaves what it says."""
    path = folder / f"log-{rank}"
    path.mkdir(exist_ok=True)
    return path


def join() -> tuple[Path, int, int]:
    """Called by a script: join the group of :func:`run`. Returns where to save to, the rank, the world size."""
    folder, world_size, rank = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return folder / f"{rank}.pt", rank, world_size
