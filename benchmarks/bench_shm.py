"""Memory that ranks share, against gloo, beside a copy: two of four ranks average weights, all four average gradients.

On the CPU the memory is the host's and the other transport gloo. With ``--device cuda`` all ranks are on one GPU and
read each other's memory on it by CUDA IPC (``ipc``); gloo, which would go over the host, is left out.

All contenders take turns, A/B/A/B, after a barrier each; a time is that of the slower of ranks 0 and 1. A *mix*
averages at once, in the weights themselves: each of the two reads and writes half of both (2 times the buffer a rank).
An *exchange* leaves time in between: it reads and writes a snapshot, reads both weights and writes one (5 times). A
copy reads and writes (2 times).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ddpcore import launch
from ddpcore.bench.environment import machine
from ddpcore.comm import Communicator, CudaIpcCommunicator, ProcessGroupCommunicator, SharedMemoryCommunicator
from ddpcore.metrics import quantiles
from ddpcore.topology import Round, Topology

WARM_UP = 3


class OnePair(Topology):
    """Learners 0 and 1 average, the others rest."""

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """See :class:`Topology`."""
        return Round(0.5, (1 - rank,), (0.5,), (1 - rank,)) if rank < 2 else Round(1.0, (), (), ())

    def period(self, num_learners: int) -> int:
        """One step is like another."""
        return 1


def contenders(numel: int, device: torch.device) -> dict[str, Callable[[int], Any]]:
    """What takes turns; each is called with the number of the repeat, by every rank."""
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
        return lambda repeat: comms[key].exchange(weights[key], pair, repeat).mix_()

    def average(key: str) -> Callable[[int], Any]:
        return lambda repeat: comms[key].average_(grads[key]).wait()

    turns: dict[str, Callable[[int], Any]] = {
        f"{ours} mix": lambda repeat: comms[ours].mix_(weights[ours], pair, repeat)
    }
    turns |= {f"{key} exchange": exchange(key) for key in comms}
    turns |= {f"{key} average": average(key) for key in comms}
    return turns | {"copy": lambda repeat: target.copy_(source) if dist.get_rank() < 2 else None}


def name_of(device: torch.device) -> str:
    """Of the transport that shares memory."""
    return "shm" if device.type == "cpu" else "ipc"


def measure(world: launch.World, numel: int, repeats: int, device: torch.device, path: Path | None) -> None:
    """The worker of ``launch.run``; rank 0 prints."""
    turns = contenders(numel, device)
    finish: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds = torch.zeros(repeats + WARM_UP, len(turns), dtype=torch.float64)
    for repeat in range(repeats + WARM_UP):
        for column, turn in enumerate(turns.values()):
            finish()
            dist.barrier()
            start = time.perf_counter()
            turn(repeat)
            finish()
            seconds[repeat, column] = time.perf_counter() - start
    everyone = [torch.zeros_like(seconds) for _ in range(world.world_size)]
    dist.all_gather(everyone, seconds)
    if world.rank == 0:
        slower = torch.maximum(everyone[0], everyone[1])[WARM_UP:]
        report(dict(zip(turns, slower.T.tolist(), strict=True)), numel, world.world_size, device, path)


def report(times: dict[str, list[float]], numel: int, world_size: int, device: torch.device, path: Path | None) -> None:
    """Medians, ratios in the same turn, bandwidth; and a row a contender in ``path``."""
    where = machine(device.type)
    shared = [f"{name_of(device)} {what}" for what in ("mix", "exchange", "average")]
    copy_rate = 8 * numel / statistics.median(times["copy"])
    table = Table(title=f"{where['device']}, {where['cores']} cores, {world_size} ranks, {4 * numel / 1e6:g} MB")
    for heading in (
        "what",
        "ms p20/p50/p80",
        f"{shared[0]} is faster",
        f"{shared[1]} is",
        f"{shared[2]} is",
        "GB/s",
        "of copy",
    ):
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
        rows.append({"case": name, "numel": numel, "ms": q, "ranks": world_size, "ratios": ratios, **where})
    Console(width=140).print(table)
    if path is not None:
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=25 * 10**6 // 4, help="float32 elements; default: 25 MB")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows to this file")
    options = parser.parse_args()
    device = torch.device(options.device, 0 if options.device == "cuda" else None)
    arguments = (options.numel, options.repeats, device, options.json)
    launch.run(measure, arguments, world_size=max(2, options.world_size), backend="gloo")


if __name__ == "__main__":
    main()
