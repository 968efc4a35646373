"""Ranks as if on two hosts, two on each, of which one fails: ``mixed_fault_ranks.py FILE``.

Each function is a trial, as in ``shared_memory_ranks``, whose way of running them this takes.
"""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddpcore
from ddpcore.comm import MixedCommunicator
from ddpcore.comm.shared import memory
from ddpcore.optim import FusedSGD
from helpers.mixed_ranks import claim_host
from helpers.shared_memory_ranks import held, main

HOSTS = "aabb"


def exchanges(rank: int, what: str, timeout: float, lost: int) -> None:
    """One rank dies, or comes late, before the exchange of step 3. Of a ring, rank 1 is no neighbour of rank 3."""
    comm, weights = MixedCommunicator(None, HOSTS, timeout), torch.zeros(1, 5000)
    for step in range(9):
        if rank == lost and step == 3:
            os.kill(os.getpid(), signal.SIGKILL) if what == "dies" else time.sleep(timeout + 3)
        comm.exchange(weights, ddpcore.Ring(), step).mixture().apply_(weights)


def averages(rank: int) -> None:
    """Rank 3 dies before an average of all."""
    comm, weights = MixedCommunicator(None, HOSTS, 60.0), torch.zeros(1, 500_000)
    for step in range(4):
        if rank == 3 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.average_(weights, step).wait()


def is_refused(rank: int) -> None:
    """Rank 3 cannot open the memory of rank 2: mixed says so on all ranks, and auto takes the process group."""

    def refuse(pid: int, descriptor: int) -> int:
        raise PermissionError("not yours")

    claim_host(HOSTS[rank])
    if rank == 3:
        memory.open_file = refuse
    for transport in ("auto", "mixed"):
        model = nn.Linear(5, 3)
        handle = ddpcore.distribute(
            model, FusedSGD(model.parameters()), ddpcore.SSGD(), connection=ddpcore.Connection(transport=transport)
        )
        print(handle.comm.description)


def runs(make: Any) -> ddpcore.comm.Communicator:
    """Three steps and an evaluation."""
    model = nn.Linear(50, 70)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, make(), connection=ddpcore.Connection(transport="mixed"))
    for _ in range(3):
        model(torch.ones(3, 50)).sum().backward()
        optimizer.step()
    assert all(one.isfinite().all() for one in handle.evaluation_model().parameters())
    return handle.comm


def frees(rank: int) -> None:
    """No mapping and no open file is left of a handle that was given up."""
    claim_host(HOSTS[rank])
    for make in (lambda: ddpcore.DPSGD(ddpcore.Ring()), lambda: ddpcore.LocalSGD(2, group=2)):
        runs(make)
        gc.collect()
        assert held() == (0, 0), held()
    print("freed")


def ends_in_an_exchange(rank: int) -> None:
    """Training ends after a forward pass: the exchange that it began goes with the process group."""
    claim_host(HOSTS[rank])
    group = dist.new_group()
    seen = weakref.ref(group)
    model = nn.Linear(50, 70)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    ddpcore.distribute(
        model, optimizer, ddpcore.DPSGD(ddpcore.Ring()), group=group, connection=ddpcore.Connection(transport="mixed")
    )
    model(torch.ones(3, 50)).sum().backward()
    optimizer.step()
    model(torch.ones(3, 50))
    dist.barrier()
    del model, optimizer
    gc.collect()
    assert held() > (0, 0), "the exchange was not in progress"
    dist.destroy_process_group(group)
    del group
    gc.collect()
    print(seen() is None, held())


def waits_for_nobody(rank: int) -> None:
    """ADPSGD takes the process group alone, for rows of the own host, too."""
    claim_host(HOSTS[rank])
    comm = runs(lambda: ddpcore.ADPSGD(ddpcore.Ring(), accelerated=True))
    print(comm.transport, comm.bytes_sent > 0)
    dist.barrier()


TRIALS: list[tuple[Any, ...]] = [  # function, number of ranks, arguments
    (exchanges, 4, "dies", 60.0, 3),
    (exchanges, 4, "late", 1.5, 3),
    (averages, 4),
    (is_refused, 4),
    (frees, 4),
    (ends_in_an_exchange, 4),
    (waits_for_nobody, 4),
]

if __name__ == "__main__":
    main(TRIALS)
