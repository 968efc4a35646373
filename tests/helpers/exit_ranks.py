"""Ranks with live weights over gloo, whose interpreters end as those of programs do: ``exit_ranks.py TIMES``.

It must be started as a process of its own: a process of ``forked`` ends without the interpreter's clean-up, in which a
thread that wakes up aborts a process. Prints a line each time: how they ended, and the exit codes of all ranks.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from ddpcore.comm import ProcessGroupCommunicator
from ddpcore.comm.base import Job

RANKS, MEETINGS, FAILS = 3, 30, 10
HOW = ("orderly", "forked", "early", "error")


def rank_of(rank: int, store: Path, how: str, seed: int) -> None:
    """``orderly``: all end together. ``early``: rank 0 ends first. ``error``: rank 1 has an error of its own.

    ``forked``: as orderly, and each rank forks a process in between, which ends at once.
    """
    dist.init_process_group("gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS)
    comm = ProcessGroupCommunicator(timeout=20)
    rows, zeros = comm.live(torch.full((1, 1000), float(rank))), torch.zeros(1000)
    draw = random.Random(seed * RANKS + rank)
    for number in range(MEETINGS):
        if number == FAILS:
            rows.settle()  # a fast rank does not leave before the one that shall be the first
            if (how, rank) == ("early", 0):
                sys.exit(0)
            if (how, rank) == ("error", 1):
                sys.exit(1)
        if how == "forked" and number == FAILS:
            child = os.fork()
            if child == 0:
                sys.exit(0)
            os.waitpid(child, 0)
        try:
            rows.meet(rank, draw.randrange(RANKS), Job(zeros.clone(), zeros.clone()))
        except RuntimeError as error:
            assert how not in ("orderly", "forked"), error
            sys.exit(3)  # the peer has left
    if how in ("orderly", "forked"):
        rows.settle()
    sys.exit(0)


def main() -> None:
    torch.set_num_threads(1)
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
