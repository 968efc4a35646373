"""One of four real ranks that average in groups, over each transport."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ddpcore
from ddpcore.comm import (
    Communicator,
    Link,
    LinkedCommunicator,
    MixedCommunicator,
    ProcessGroupCommunicator,
    SharedMemoryCommunicator,
    reductions,
)
from ddpcore.optim import FusedSGD
from helpers.ranks import join

NUM_RANKS, NUM_ROWS, AHEAD = 4, 2, 600  # more averages than shared memory keeps texts of
DTYPES = (torch.float32, torch.bfloat16, torch.complex64)
SIZES = {"pg": (2, 4), "shm": (2, 4), "link": (2,), "mixed": (2, 4), "grid": (2, 4, 8)}
COLUMNS = slice(3, 40)


def rows_of(learners: Any, dtype: torch.dtype) -> Tensor:
    """Other numbers for each learner, ``[L, 50]``."""
    rows = [torch.randn(50, generator=torch.Generator().manual_seed(7 + learner)) for learner in learners]
    return torch.stack(rows).to(dtype)


def averages(comm: Communicator, sizes: tuple[int, ...]) -> dict[Any, tuple[Tensor, int]]:
    """Some columns of rows of their own, and of rows that the connection allocated; and what was sent for them."""
    seen: dict[Any, tuple[Tensor, int]] = {}
    gather_bytes = reductions.GATHER_BYTES
    for size in sizes:
        comm.form_groups(size)
        for dtype in DTYPES:
            for way, limit in (("gathered", gather_bytes), ("reduced", 0)):
                reductions.GATHER_BYTES = limit
                for place in ("own", "allocated"):
                    rows, sent = rows_of(comm.learners, dtype), comm.bytes_sent
                    if place == "allocated":
                        rows = comm.allocate(rows.shape, dtype, torch.device("cpu")).copy_(rows)
                    columns = rows[:, COLUMNS] if place == "allocated" or len(rows) > 1 else rows
                    comm.average_(columns, 3, size).wait()
                    seen[size, dtype, way, place] = rows.clone(), comm.bytes_sent - sent
    reductions.GATHER_BYTES = gather_bytes
    return seen


def alone(comm: Communicator, rank: int, store: dist.Store, name: str) -> None:
    """The second group begins when the first one is ready; then it is late for an average of all."""
    comm.form_groups(2)
    group = comm.allocate((1, 8), torch.float32, torch.device("cpu"))
    everyone = comm.allocate((1, 8), torch.float32, torch.device("cpu")).fill_(rank)
    for turn in range(2):
        work = comm.average_(everyone) if turn else None
        if rank >= 2:
            store.wait([f"{name} {turn}"])
            if work is not None:
                work.wait()
        for _ in range(AHEAD):
            comm.average_(group.fill_(rank), size=2).wait()
        private = torch.full((1, 8), float(rank))
        comm.average_(private, size=2).wait()
        assert group.tolist() == private.tolist() == [[rank // 2 * 2 + 0.5] * 8]
        if rank == 0:
            store.set(f"{name} {turn}", "ready")
        if work is not None:
            work.wait()
            assert everyone.tolist() == [[1.5] * 8]


def in_a_part_of_the_world(rank: int) -> list[float]:
    """Ranks 1 to 3 are a process group of three learners, with groups of one; ranks 0 and 2 one of two."""
    seen = []
    for members, size in (([1, 2, 3], 3), ([0, 2], 2), ([0, 1, 2, 3], 2)):
        group = dist.new_group(members)
        if rank in members:
            comm = ProcessGroupCommunicator(group)
            comm.form_groups(size)
            rows = torch.full((1, 4), float(rank))
            comm.average_(rows, size=size).wait()
            seen.append(rows[0, 0].item())
    return seen


def scaled(rank: int, transport: str) -> list[tuple[Tensor, float]]:
    """Weights and scale after each step. In the second one the loss of rank 2 overflows."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    ddpcore.distribute(
        model,
        optimizer,
        ddpcore.LocalSGD(3, group=2),
        connection=ddpcore.Connection(transport=transport),
        scaler=scaler,
    )
    seen = []
    for step in range(6):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(inputs).square().mean() * (1e38 if (rank, step) == (2, 1) else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((torch.cat([p.detach().flatten() for p in model.parameters()]), scaler.get_scale()))
    return seen


def refused(rank: int) -> str:
    """A group of two that would hold a part of the three learners of each rank."""
    model = nn.Linear(2, 1)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    before = model.weight.data_ptr()
    try:
        ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(3, group=2), learners=3, group=dist.group.WORLD)
    except ValueError as error:
        assert model.weight.data_ptr() == before
        return str(error)
    return ""


def main() -> None:
    path, rank, _ = join()
    store = dist.FileStore(str(Path(sys.argv[1]) / "events"), NUM_RANKS)
    comms: dict[str, Communicator] = {
        "pg": ProcessGroupCommunicator(timeout=60.0),
        "shm": SharedMemoryCommunicator(timeout=60.0),
        "link": LinkedCommunicator(SharedMemoryCommunicator(timeout=60.0), Link.parse("1Mb/s,1ms")),
        "mixed": MixedCommunicator(None, ["one", "one", "other", "other"], timeout=60.0),
        "grid": ProcessGroupCommunicator(num_rows=NUM_ROWS, timeout=60.0),
    }
    seen: dict[str, Any] = {name: averages(comm, SIZES[name]) for name, comm in comms.items()}
    for name in ("pg", "shm", "mixed"):
        alone(comms[name], rank, store, name)
    seen["part"] = in_a_part_of_the_world(rank)
    seen["scaled"] = {transport: scaled(rank, transport) for transport in ("pg", "shm")}
    seen["refused"] = refused(rank)
    torch.save(seen, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
