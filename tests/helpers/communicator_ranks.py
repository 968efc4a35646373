"""One of three real ranks that try each call of the connection once, over each transport."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpcore import Complete, Matching, RandomPair, Ring, Topology
from ddpcore.comm import (
    Communicator,
    MixedCommunicator,
    ProcessGroupCommunicator,
    SharedMemoryCommunicator,
    reductions,
)
from helpers.ranks import join

TOPOLOGIES = (Complete(), Ring(), RandomPair(seed=2), Matching([[(0, 1)], [(1, 2)], []]))


def communicator(comm: Communicator, rank: int) -> dict[str, Any]:
    seen: dict[str, Any] = {"learners": comm.learners, "n": comm.num_learners}
    gather_bytes = reductions.GATHER_BYTES
    for way, limit in (("by_gather", gather_bytes), ("by_reduce", 0)):
        reductions.GATHER_BYTES = limit
        sent = comm.bytes_sent
        rows = torch.arange(8.0)[None] + 10 * rank
        comm.average_(rows[:, 2:6]).wait()
        seen[way], seen[f"bytes_{way}"] = rows, comm.bytes_sent - sent
    reductions.GATHER_BYTES = gather_bytes
    first, second = torch.full((1, 5), float(rank)), torch.full((1, 70), 10.0 * rank)
    works = [comm.average_(first), comm.average_(second)]
    for work in works:
        work.wait()
    seen["first"], seen["second"] = first, second
    same = torch.full((1, 3), float(rank))
    comm.broadcast_(same)
    seen["broadcast"] = same
    seen["gathered"] = comm.gather(torch.tensor([[float(rank), -1.0]]))
    seen["gathered_mask"] = comm.gather(torch.tensor([[rank, 1]]))
    weights, sent = torch.full((1, 16), float(rank)), comm.bytes_sent
    exchange = comm.exchange(weights, Complete(), 0)
    exchange.mixture().apply_(weights)
    seen["mixed"], seen["bytes_exchange"] = weights, comm.bytes_sent - sent
    seen["at_once"] = {str(topology): at_once(comm, topology, rank) for topology in TOPOLOGIES}
    return seen


def at_once(comm: Communicator, topology: Topology, rank: int) -> list[tuple[Tensor, Tensor, int, int]]:
    """Four steps of ``mix_`` and of an exchange from the same weights, and what each sent."""
    steps = []
    generator = torch.Generator().manual_seed(rank)
    for step in range(4):
        weights = comm.allocate((1, 70001), torch.float32, torch.device("cpu")).normal_(generator=generator)
        other, sent = weights.clone(), comm.bytes_sent
        comm.mix_(weights, topology, step)
        between = comm.bytes_sent
        comm.exchange(other, topology, step).mixture().apply_(other)
        steps.append((weights.clone(), other, between - sent, comm.bytes_sent - between))
    return steps


def narrow(comm: Communicator, rank: int) -> dict[str, Any]:
    """Averages of 16 bits: of rows that are alike and of others, gathered, reduced, and of shared memory."""
    seen: dict[str, Any] = {}
    gather_bytes = reductions.GATHER_BYTES
    for dtype in (torch.bfloat16, torch.float16):
        for what, seed in (("alike", 7), ("own", rank)):
            given = torch.randn(len(comm.learners), 5000, generator=torch.Generator().manual_seed(seed)).to(dtype)
            for way, limit in (("by_gather", gather_bytes), ("by_reduce", 0)):
                reductions.GATHER_BYTES = limit
                rows, sent = given.clone(), comm.bytes_sent
                if what == "alike":
                    rows[:] = given[0]
                start = rows.clone()
                comm.average_(rows).wait()
                seen[f"{what} {dtype} {way}"] = start, rows, comm.bytes_sent - sent
            shared = comm.allocate(start.shape, dtype, torch.device("cpu")).copy_(start)
            comm.average_(shared).wait()
            seen[f"{what} {dtype} allocated"] = start, shared.clone(), None
    reductions.GATHER_BYTES = gather_bytes
    return seen


MEAN = (torch.float64, torch.float32, torch.complex64)
NO_MEAN = (torch.float8_e4m3fn, torch.int16, torch.int64, torch.bool)


def dtypes(comm: Communicator, rank: int) -> dict[str, Any]:
    """Of each dtype: own rows, and those after a broadcast, a gathering and an average, or the errors of an average."""
    seen: dict[str, Any] = {}
    for dtype in MEAN + NO_MEAN:
        rows = (torch.arange(6).view(1, 6) + rank).to(dtype).repeat(len(comm.learners), 1)
        first, averaged = rows.clone(), rows.clone()
        comm.broadcast_(first)
        moved = [tensor.view(torch.uint8) for tensor in (rows, first, comm.gather(rows))]  # torch compares no float8
        if dtype in MEAN:
            comm.average_(averaged).wait()
            seen[str(dtype)] = *moved, averaged
            continue
        sent = comm.bytes_sent
        errors = []
        for call in (comm.average_, lambda rows: comm.mix_(rows, Complete(), 0)):
            try:
                call(rows)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        seen[str(dtype)] = *moved, (errors, comm.bytes_sent - sent)
    return seen


def order(comm: ProcessGroupCommunicator) -> list[str]:
    """The calls of an exchange with both neighbours."""
    names, group = [], comm._own

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            names.append(name)
            return getattr(group, name)

    comm._own = Recorder()
    comm.exchange(torch.zeros(1, 4), Ring(), 0).received()
    comm._own = group
    return [name for name in names if name in ("send", "recv")]


def main() -> None:
    path, rank, _ = join()
    pg, shm = ProcessGroupCommunicator(), SharedMemoryCommunicator(timeout=60.0)
    mixed = MixedCommunicator(None, ["one", "one", "other"], timeout=60.0)
    seen = {"pg": communicator(pg, rank), "shm": communicator(shm, rank), "mixed": communicator(mixed, rank)}
    seen["narrow"] = {
        "pg": narrow(pg, rank),
        "shm": narrow(shm, rank),
        "mixed": narrow(mixed, rank),
        "grid": narrow(ProcessGroupCommunicator(num_rows=2), rank),
    }
    seen["dtypes"] = {
        "pg": dtypes(pg, rank),
        "shm": dtypes(shm, rank),
        "mixed": dtypes(mixed, rank),
        "grid": dtypes(ProcessGroupCommunicator(num_rows=2), rank),
    }
    seen["order"] = order(pg)
    torch.save(seen, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
