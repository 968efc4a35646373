"""Shared memory against gloo and a copy: two of four ranks average weights, and all four average gradients.

On the CPU the ranks share host memory, and the other transport is gloo. With ``--device cuda`` all ranks are on one GPU
and read each other's memory by CUDA IPC (``ipc``); gloo is left out because it copies through the host.

All contenders run in turn, A/B/A/B, each after a barrier. A time is that of the slower of ranks 0 and 1, divided by
``--calls``, the number of calls after each barrier. Ranks leave a barrier at different times, up to a millisecond apart
where they share cores, so short calls need many. A *mix*
averages in place: each of the two ranks reads and writes half of both weights, so it moves 2 times the buffer. An
*exchange* overlaps with computation: it reads and writes a snapshot, reads both weights and writes one (5 times the
buffer). A copy reads and writes (2 times the buffer).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import add_options, append
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from ddpcore import Round, Topology
from ddpcore.comm import Communicator, CudaIpcCommunicator, ProcessGroupCommunicator, SharedMemoryCommunicator
from ddpcore.runtime import launch
from ddpcore.runtime.machine import machine
from ddpcore.runtime.timing import quantiles

WARM_UP = 3


class OnePair(Topology):
    """Learners 0 and 1 average with each other; the others have no neighbour."""

    @override
    def round(self, step: int, rank: int, num_learners: int) -> Round:
        return Round(0.5, (1 - rank,), (0.5,), (1 - rank,)) if rank < 2 else Round(1.0, (), (), ())

    @override
    def period(self, num_learners: int) -> int:
        return 1


def contenders(numel: int, device: torch.device) -> dict[str, Callable[[int], Any]]:
    """The functions to compare. Every rank calls each of them with the number of the repeat."""
    on_cpu = device.type == "cpu"
    ours = name_of(device)
    comms: dict[str, Communicator] = {ours: SharedMemoryCommunicator() if on_cpu else CudaIpcCommunicator(None, device)}
    if on_cpu:
        comms["gloo"] = ProcessGroupCommunicator()
    weights, grads = (
        {key: comm.allocate((1, numel), torch.float32, device) for key, comm in comms.items()} for _ in "wg"
    )
    for rows in (*weights.values(), *grads.values()):
        rows.normal_()
    source, target = torch.randn(numel, device=device), torch.zeros(numel, device=device)
    pair = OnePair()

    def exchange(key: str) -> Callable[[int], Any]:
        return lambda repeat: comms[key].exchange(weights[key], pair, repeat).mixture().apply_(weights[key])

    def average(key: str) -> Callable[[int], Any]:
        return lambda repeat: comms[key].average_(grads[key]).wait()

    turns: dict[str, Callable[[int], Any]] = {
        f"{ours} mix": lambda repeat: comms[ours].mix_(weights[ours], pair, repeat)
    }
    turns |= {f"{key} exchange": exchange(key) for key in comms}
    turns |= {f"{key} average": average(key) for key in comms}
    return turns | {"copy": lambda repeat: target.copy_(source) if dist.get_rank() < 2 else None}


def name_of(device: torch.device) -> str:
    """The transport that shares memory on this device: ``shm`` or ``ipc``."""
    return "shm" if device.type == "cpu" else "ipc"


def measure(world: launch.World, numel: int, repeats: int, calls: int, device: torch.device, path: Path | None) -> None:
    """Run on every rank by ``launch.run``; rank 0 prints."""
    turns = contenders(numel, device)
    finish: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds = torch.zeros(repeats + WARM_UP, len(turns), dtype=torch.float64)
    for repeat in range(repeats + WARM_UP):
        for column, turn in enumerate(turns.values()):
            finish()
            dist.barrier()
            start = time.perf_counter()
            for call in range(calls):
                turn(repeat * calls + call)
            finish()
            seconds[repeat, column] = (time.perf_counter() - start) / calls
    everyone = [torch.zeros_like(seconds) for _ in range(world.world_size)]
    dist.all_gather(everyone, seconds)
    if world.rank == 0:
        slower = torch.maximum(everyone[0], everyone[1])[WARM_UP:]
        report(dict(zip(turns, slower.T.tolist(), strict=True)), numel, calls, world.world_size, device, path)


def report(
    times: dict[str, list[float]], numel: int, calls: int, world_size: int, device: torch.device, path: Path | None
) -> None:
    """Print medians, ratios in the same turn and bandwidth; append a row for each contender to ``path``."""
    where = machine(device.type)
    shared = [f"{name_of(device)} {what}" for what in ("mix", "exchange", "average")]
    copy_rate = 8 * numel / statistics.median(times["copy"])
    table = Table(title=f"{where['device']}, {where['cores']} cores, {world_size} ranks, {4 * numel / 1e6:g} MB")
    faster = (f"{shared[0]} is faster", f"{shared[1]} is", f"{shared[2]} is")
    for heading in ("what", "ms p20/p50/p80", *faster, "GB/s", "of copy"):
        table.add_column(heading, justify="right" if heading != "what" else "left")
    rows = []
    for name, ours in times.items():
        q = quantiles([1e3 * one for one in ours])
        ratios = {
            shm: statistics.median(theirs / mine for mine, theirs in zip(times[shm], ours, strict=True))
            for shm in shared
        }
        num_bytes = {shared[0]: 8 * numel, shared[1]: 20 * numel, "copy": 8 * numel}.get(name)
        rate = None if num_bytes is None else num_bytes / statistics.median(ours)
        table.add_row(
            name,
            "/".join(f"{q[p]:.2f}" for p in ("p20", "p50", "p80")),
            *(f"{ratio:.1f}x" for ratio in ratios.values()),
            *(("", "") if rate is None else (f"{rate / 1e9:.1f}", f"{rate / copy_rate:.0%}")),
        )
        rows.append(
            {"case": name, "numel": numel, "calls": calls, "ms": q, "ranks": world_size, "ratios": ratios, **where}
        )
    Console(width=140).print(table)
    append(path, *rows)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=25 * 10**6 // 4, help="float32 elements; default: 25 MB")
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--calls", type=int, default=1, help="after each barrier")
    add_options(parser, repeats=21)
    parser.set_defaults(device="cpu")
    options = parser.parse_args()
    if options.calls < 1:
        parser.error(f"--calls is {options.calls}: it must be at least 1")
    device = torch.device(options.device, 0 if options.device == "cuda" else None)
    arguments = (options.numel, options.repeats, options.calls, device, options.json)
    launch.run(measure, arguments, world_size=max(2, options.world_size), backend="gloo")


if __name__ == "__main__":
    main()
