"""One of four ranks whose averages a thread computes: words after the rank say what it does."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpcore.comm import SharedMemoryCommunicator
from ddpcore.comm.shared import segments
from ddpcore.runtime import launch
from helpers import oracle
from helpers.ranks import join

CPU = torch.device("cpu")
CASES = [oracle.Case(name, "all_gather", 4, "fused") for name in ("ssgd", "local_sgd", "grouped")]
NUM_AVERAGES = 600  # more than may be begun and not computed
SECONDS = 60.0  # after which a test fails


def shared_row(comm: SharedMemoryCommunicator, size: int, value: float) -> Tensor:
    row = comm.allocate((1, size), torch.float32, CPU)
    return row.fill_(value)


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "ddpcore averages"]


def wait_for(condition: Callable[[], bool]) -> None:
    """Until the condition holds, or SECONDS have passed: then the test fails."""
    end = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)


def without_wait(rank: int, in_thread: bool) -> dict[str, Any]:
    """What a row holds when all ranks have begun its average and none waits for it."""
    comm = SharedMemoryCommunicator(in_thread=in_thread)
    row = shared_row(comm, 5000, float(rank))
    work = comm.average_(row)
    dist.barrier()
    if in_thread:
        wait_for(partial(torch.equal, row, torch.full_like(row, 1.5)))
    before_wait = row.clone()
    dist.barrier()
    work.wait()
    names, description = threads(), comm.description
    del work, comm, row
    gc.collect()
    wait_for(lambda: not threads())  # a thread may hold the last reference for a moment
    return {"before_wait": before_wait, "threads": names, "description": description, "at_the_end": threads()}


def many(rank: int) -> dict[str, Any]:
    """Averages of parts of a row, begun in one order and waited for in another; other operations between them."""
    comm = SharedMemoryCommunicator(in_thread=True)
    row, chosen = shared_row(comm, 10 * NUM_AVERAGES, 0.0), random.Random(5)
    row.copy_(torch.arange(10.0 * NUM_AVERAGES) * (rank + 1))
    works, gathered = [], []
    for number, columns in enumerate(row.split(10, dim=1)):
        works.append(comm.average_(columns, number))
        if chosen.random() < 0.3:
            works.pop(chosen.randrange(len(works))).wait()
        if number % 97 == 0:
            gathered.append(comm.gather(torch.tensor([[number + rank]])))
    for work in works:
        work.wait()
    return {"row": row.clone(), "gathered": gathered}


def trained() -> dict[Any, Any]:
    """The results of the oracle's cases where cores are free."""
    launch.num_cores = lambda: 8
    return {tuple(case): oracle.train(case, dist.group.WORLD, transport="shm") for case in CASES}


def other_sizes(rank: int) -> str:
    """What a rank is told if one of them averages other columns."""
    comm = SharedMemoryCommunicator(in_thread=True)
    row = shared_row(comm, 100, 0.0)
    works = [comm.average_(row[:, : 50 if rank == 2 else 60], 7)]
    dist.barrier()
    time.sleep(0.1)  # for the threads, which see it first
    try:
        works[0].wait()
        comm.average_(row)
        comm.average_(row).wait()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def unlike_and_old() -> str:
    """What a rank is told if the first of many averages is of other columns on one rank, and none waits."""
    comm = SharedMemoryCommunicator(in_thread=False)
    row = shared_row(comm, 100, 0.0)
    try:
        works = [comm.average_(row[:, : 50 if dist.get_rank() == 2 else 60], 7)]
        works += [comm.average_(row, number) for number in range(NUM_AVERAGES)]
        works[0].wait()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def stopped(rank: int, in_thread: bool) -> tuple[str, str]:
    """What a rank is told if the first average of rank 1 ends in the middle, when it waits and when it waits again."""
    comm = SharedMemoryCommunicator(in_thread=in_thread)
    row, real = shared_row(comm, 100, float(rank)), segments.average_share_

    def half(columns: list[Tensor], share: int) -> None:
        segments.average_share_ = real
        columns[0].add_(1)
        raise MemoryError("none is left") if in_thread else KeyboardInterrupt

    if rank == 1:
        segments.average_share_ = half
    work = comm.average_(row)
    dist.barrier()
    if rank == 1 and in_thread:  # else this thread may compute the average
        wait_for(lambda: segments.average_share_ is real)
    told = []
    for _ in range(2):
        try:
            work.wait()
            told.append(f"no error: {row.unique().tolist()}")
        except (KeyboardInterrupt, RuntimeError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told[0], told[1]


def settled(rank: int) -> Tensor:
    """An average that rank 0 has waited for, after an operation that waits for no average; the others wait late."""
    comm = SharedMemoryCommunicator(in_thread=False)
    row, live = shared_row(comm, 1000, float(rank)), comm.live(torch.zeros(1, 3))
    work = comm.average_(row)
    live.settle()
    time.sleep(0.0 if rank == 0 else 0.3)
    work.wait()
    return row.clone()


def main() -> None:
    path, rank, _ = join()
    what = sys.argv[4]
    if what == "dies":  # rank 3 does so
        comm = SharedMemoryCommunicator(in_thread=True)
        row = shared_row(comm, 100, 0.0)
        if rank == 3:
            torch.save("died", path)
            os._exit(0)
        try:
            comm.average_(row).wait()
        except RuntimeError as error:
            torch.save(str(error), path)
        return
    if what == "leaves":  # while averages have begun that rank 3 does not begin
        comm = SharedMemoryCommunicator(in_thread=True)
        row = shared_row(comm, 100, 0.0)
        torch.save("left", path)
        if rank < 3:
            comm.average_(row)
        dist.barrier()
        return
    calls = {
        "thread": lambda: without_wait(rank, True),
        "none": lambda: without_wait(rank, False),
        "many": lambda: many(rank),
        "trained": trained,
        "other_sizes": lambda: other_sizes(rank),
        "unlike_and_old": unlike_and_old,
        "inference": lambda: torch.inference_mode()(without_wait)(rank, True),
        "stopped_in_thread": lambda: stopped(rank, True),
        "stopped": lambda: stopped(rank, False),
        "settled": lambda: settled(rank),
    }
    torch.save(calls[what](), path)
    dist.barrier()


if __name__ == "__main__":
    main()
