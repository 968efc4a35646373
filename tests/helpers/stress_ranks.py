"""One of four ranks that call random operations for some seconds, and check each against virtual learners.

Over shared memory and over a process group, of any size and dtype; that group gathers rows of these sizes.

DDPCORE_STRESS_SECONDS and DDPCORE_STRESS_SEED change length and order.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence

import torch
from torch import Tensor

import ddpcore
from ddpcore.comm import Communicator, ProcessGroupCommunicator, SharedMemoryCommunicator, VirtualCommunicator
from helpers.ranks import join

SECONDS = float(os.environ.get("DDPCORE_STRESS_SECONDS", "2"))
SEED = int(os.environ.get("DDPCORE_STRESS_SEED", "0"))
LARGEST = 70_001  # elements: three rows of float64 are below GATHER_BYTES
MIXED, AVERAGED = (torch.float32, torch.bfloat16, torch.float16), (torch.float64, torch.complex64)
AT_A_TIME = 20  # operations between two looks at the clock of rank 0
TOPOLOGIES = (ddpcore.Ring(), ddpcore.Complete(), ddpcore.RandomPair(seed=SEED), ddpcore.OnePeerExponential())


def operate(comms: Sequence[Communicator], rank: int, number: int) -> tuple[str, Tensor, Tensor]:
    """The operation of this number: its name, its result here, and the result of virtual learners."""
    chosen = random.Random(SEED * 1_000_003 + number)  # the same on all ranks
    comm = chosen.choice(comms)
    name = chosen.choice(("average", "exchange", "mix", "in_place", "gather", "broadcast"))
    size = int(LARGEST ** chosen.random())
    dtype = chosen.choice(MIXED if name in ("exchange", "mix", "in_place") else MIXED + AVERAGED)
    topology, is_shared = chosen.choice(TOPOLOGIES), chosen.random() < 0.5
    all_rows = torch.randn(comm.num_learners, size, generator=torch.Generator().manual_seed(number)).to(dtype)
    virtual = VirtualCommunicator(comm.num_learners)
    new = comm.allocate((1, size), dtype, torch.device("cpu")) if is_shared else None
    rows = torch.empty(1, size, dtype=dtype) if new is None else new
    rows.copy_(all_rows[rank])
    if name == "average":
        comm.average_(rows).wait()
        virtual.average_(all_rows).wait()
    elif name == "broadcast":
        comm.broadcast_(rows)
        virtual.broadcast_(all_rows)
    elif name == "gather":
        return name, comm.gather(rows), all_rows
    elif name == "mix":
        comm.mix_(rows, topology, number)
        virtual.mix_(all_rows, topology, number)
    else:
        mixture = comm.exchange(rows, topology, number, in_place=name == "in_place" and is_shared).mixture()
        mixture.apply_(rows)
        rows = rows if getattr(mixture, "out", None) is None else mixture.out[None]  # others still read these rows
        virtual.exchange(all_rows, topology, number).mixture().apply_(all_rows)
    return name, rows, all_rows[rank : rank + 1]


def main() -> None:
    file, rank, _ = join()
    comms = SharedMemoryCommunicator(timeout=120.0), ProcessGroupCommunicator()
    first, end = 0, time.monotonic() + SECONDS
    goes_on, seen = torch.ones(1, 1), dict[str, int]()
    while bool(goes_on):
        for number in range(first, first + AT_A_TIME):
            name, found, expected = operate(comms, rank, number)
            where = f"rank {rank}, operation {number}, {name} of {found.numel()} {found.dtype}, seed {SEED}"
            assert torch.equal(found, expected), f"{where}: {found.flatten()[:3]} instead of {expected.flatten()[:3]}"
            seen[name] = seen.get(name, 0) + 1
        first += AT_A_TIME
        goes_on.fill_(time.monotonic() < end)
        comms[0].broadcast_(goes_on)
    torch.save(seen, file)


if __name__ == "__main__":
    main()
