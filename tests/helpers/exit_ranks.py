"""Ranks with live weights over gloo, whose interpreters end as those of programs do: ``exit_ranks.py TIMES``.

It must be started as a process of its own: a process of ``forked`` ends without the interpreter's clean-up, in which a
thread that wakes up aborts a process. Prints a line each time: how they ended, and the exit codes of all ranks.

Only a busy machine takes long here, so no limit is short: a rank that leaves waits for the replies of the others.
"""

from __future__ import annotations

import atexit
import gc
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ddpcore.comm import ProcessGroupCommunicator, served
from ddpcore.comm.base import Job

RANKS, MEETINGS, FAILS = 3, 30, 10
HOW = ("orderly", "early", "error")
SECONDS = 120.0


def rank_of(rank: int, store: Path, how: str, seed: int) -> None:
    """``early``: rank 0 ends first. ``error``: rank 1 has an error of its own.

    ``orderly``: all end together, and each rank has forked a process in between, which ended at once. The last rank
    forks another one, when the others have left, in which the collector finds what was left of the parent's.
    """
    dist.init_process_group("gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS)
    comm = ProcessGroupCommunicator(timeout=SECONDS)
    rows, zeros = comm.live(torch.full((1, 1000), float(rank))), torch.zeros(1000)
    draw = random.Random(seed * RANKS + rank)
    for number in range(MEETINGS):
        if number == FAILS:
            rows.settle()  # a fast rank does not leave before the one that shall be the first
            if (how, rank) == ("early", 0):
                sys.exit(0)
            if (how, rank) == ("error", 1):
                sys.exit(1)
        if how == "orderly" and number == FAILS:
            child = os.fork()
            if child == 0:
                # As processes of multiprocessing end. The interpreter's clean-up would destroy the groups of torch, and
                # their destructor may wait forever for the threads that waited in them, which a forked process lacks.
                atexit._run_exitfuncs()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        try:
            rows.meet(rank, draw.randrange(RANKS), Job(zeros.clone(), zeros.clone()))
        except RuntimeError as error:
            assert how != "orderly", error
            sys.exit(3)  # the peer has left
    if how == "orderly":
        rows.settle()
        if rank == RANKS - 1:
            while threading.active_count() > 1:  # the thread ends when nobody can ask any more
                time.sleep(0.01)
            child = os.fork()
        if rank < RANKS - 1 or child == 0:
            del rows, comm
            gc.collect()
        if rank == RANKS - 1:
            if child == 0:
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    sys.exit(0)


def main() -> None:
    torch.set_num_threads(1)
    served._LEAVE_SECONDS = SECONDS
    for how in HOW:
        for seed in range(int(sys.argv[1])):
            store = Path(tempfile.mkdtemp()) / "store"
            pids = []
            for rank in range(RANKS):
                pids.append(os.fork())
                if pids[-1] == 0:
                    rank_of(rank, store, how, seed)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            print(how, *codes, flush=True)
            store.unlink(missing_ok=True)
            store.parent.rmdir()


if __name__ == "__main__":
    main()
