"""How much of an average in shared memory a thread of each rank hides while the rank leaves its core idle.

    python benchmarks/hidden_averages.py [--numel 6000000] [--world-size 2] [--idle 0.1] [--repeats 15]

Each rank begins to average its buckets. Then it sleeps, as a rank does that waits for data or for an accelerator.
Then it waits for the averages. The time of this wait is measured, with and without the thread, A/B/A/B. On a machine
with at least two cores for each rank, a rank that computes leaves a core idle too.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from ddpcore.comm import SharedMemoryCommunicator
from ddpcore.runtime import launch

NUM_BUCKETS = 4
WARM_UP = 2


def waits(world: launch.World, numel: int, idle: float, repeats: int) -> dict[str, list[float]]:
    """Milliseconds that the slowest rank waits, without and with the thread, in each repeat."""
    found: dict[str, list[float]] = {"who waits": [], "a thread": []}
    comms = [SharedMemoryCommunicator(in_thread=in_thread) for in_thread in (False, True)]
    rows = [comm.allocate((1, numel), torch.float32, torch.device("cpu")) for comm in comms]
    for repeat in range(repeats + WARM_UP):
        for comm, row, times in zip(comms, rows, found.values(), strict=True):
            row.fill_(world.rank)
            dist.barrier()
            works = [comm.average_(columns, repeat) for columns in row.split(-(-numel // NUM_BUCKETS), dim=1)]
            time.sleep(idle)
            start = time.perf_counter()
            for work in works:
                work.wait()
            slowest = torch.tensor(1e3 * (time.perf_counter() - start))
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            assert bool((row == (world.world_size - 1) / 2).all())
            if repeat >= WARM_UP:
                times.append(slowest.item())
    return found


def measure(world: launch.World, numel: int, idle: float, repeats: int) -> None:
    """Run on every rank by ``launch.run``; rank 0 prints."""
    found = waits(world, numel, idle, repeats)
    if world.rank > 0:
        return
    print(f"{world.world_size} ranks, {launch.num_cores()} cores, {4 * numel / 1e6:g} MB, {1e3 * idle:g} ms idle")
    for name, times in found.items():
        least, middle, most = min(times), statistics.median(times), max(times)
        print(f"{name + ' averages:':<20}{middle:8.2f} ms of waiting ({least:.2f} to {most:.2f})")


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=6_000_000, help="float32 elements")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--idle", type=float, default=0.1, help="seconds")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    launch.run(measure, (options.numel, options.idle, options.repeats), world_size=options.world_size, backend="gloo")


if __name__ == "__main__":
    main()
