"""Ranks on two hosts, each in a network namespace: what each finds there, as JSON, one file a rank."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ddpcore.experiments import hosts
from ddpcore.runtime.launch import World


def look(world: World, folder: Path) -> None:
    """Sum over all ranks, and look around."""
    total = torch.tensor([2.0**world.rank])
    dist.all_reduce(total)
    found = {
        "sum": total.item(),
        "namespace": os.readlink("/proc/self/ns/net"),
        "devices": sorted(line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]),
        "world": [world.rank, world.local_rank, world.local_world_size],
        "cores": sorted(os.sched_getaffinity(0)),
    }
    (folder / f"{world.rank}.json").write_text(json.dumps(found))


def fail(world: World, folder: Path) -> None:
    """Rank 1 does; the others would wait for a long time."""
    (folder / f"{world.rank}.pid").write_text(str(os.getpid()))
    dist.barrier()
    if world.rank == 1:
        raise ArithmeticError("rank 1 cannot count")
    time.sleep(600)


def main(name: str, folder: str) -> None:
    """In a process of its own."""
    worker = {"look": look, "fail": fail}[name]
    try:
        hosts.run(worker, (Path(folder),), world_size=4)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
