"""Starts real gloo ranks for a test: one process a rank, each running a script of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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


def run(script: str, world_size: int, timeout: float = LIMIT, more: Sequence[Sequence[object]] = ()) -> list[Any]:
    """What ``script`` saves on each rank. A rank that fails, or a run that lasts too long, is a RuntimeError.

    ``more`` are further words for each rank.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, ranks = Path(name), []
        for rank in range(world_size):
            words = ["-m", f"helpers.{script}", name, str(world_size), str(rank), *map(str, more[rank] if more else ())]
            ranks.append(forked.start(words, log_folder(folder, rank), environment(), Path.cwd()))
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
