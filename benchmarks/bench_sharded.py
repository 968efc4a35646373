"""Whole steps of learners that FSDP2 shards over two ranks, beside FSDP2's own steps without an average.

Contenders of one run take turns, A/B/A/B, each after a barrier; a time is the slowest rank's. The model is a small
transformer of about ``--millions`` parameters, the optimizer FusedAdamW.
On the CPU, by gloo and shared memory.

``PYTHONPATH=. python benchmarks/bench_sharded.py --world-size 4``
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import add_options, append
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import ddpcore
from ddpcore.optim import FusedAdamW
from ddpcore.runtime import launch
from ddpcore.runtime.machine import machine
from ddpcore.runtime.timing import quantiles

WARM_UP = 3
WIDTH, TOKENS = 256, 32
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
STRATEGIES: dict[str, Callable[[], Any] | None] = {
    "FSDP2 alone": None,
    "ssgd": ddpcore.SSGD,
    "dpsgd": ddpcore.DPSGD,
    "local_sgd": partial(ddpcore.LocalSGD, 8),
    "diloco": partial(ddpcore.LocalSGD, 8, outer=OUTER),
}


def model(millions: float, mesh: DeviceMesh) -> nn.Module:
    """Blocks of 0.79 million parameters each."""
    torch.manual_seed(0)
    blocks = [
        nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        for _ in range(max(1, round(millions / 0.79)))
    ]
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(nn.Sequential(*blocks), mesh=mesh)


def step_of(name: str, options: argparse.Namespace, mesh: DeviceMesh) -> Callable[[], Any]:
    """One whole step: forward, backward, and the optimizer's step with its average."""
    trained = model(options.millions, mesh["shard"])
    optimizer = FusedAdamW(trained.parameters(), lr=1e-4)
    if (make := STRATEGIES[name]) is not None:
        ddpcore.distribute(trained, optimizer, make(), mesh=mesh["learners"])
    inputs = torch.randn(options.batch, TOKENS, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        trained(inputs).square().mean().backward()
        optimizer.step()

    return step


def measure(world: launch.World, options: argparse.Namespace) -> None:
    """Run on every rank by ``launch.run``; rank 0 prints."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world.world_size // 2, 2), mesh_dim_names=("learners", "shard"))
    steps = {name: step_of(name, options, mesh) for name in STRATEGIES}
    seconds = torch.zeros(options.repeats + WARM_UP, len(steps), dtype=torch.float64)
    for repeat in range(options.repeats + WARM_UP):
        for column, step in enumerate(steps.values()):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(8):  # a period of local steps
                step()
            seconds[repeat, column] = (time.perf_counter() - start) / 8
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    if world.rank:
        return
    measured = seconds[WARM_UP:]
    table = Table(
        title=f"{world.world_size} ranks on {machine('cpu')['cores']} cores, {options.millions:g} M parameters"
    )
    for heading in ("strategy", "ms a step p20/p50/p80", "/ FSDP2 alone p20/p50/p80"):
        table.add_column(heading, no_wrap=True)
    for name, mine in zip(steps, measured.T, strict=True):
        times, ratio = quantiles((1e3 * mine).tolist()), quantiles((mine / measured[:, 0]).tolist())
        shown = [
            "/".join(f"{row[p]:.{digits}f}" for p in ("p20", "p50", "p80")) for row, digits in ((times, 1), (ratio, 2))
        ]
        table.add_row(name, *shown)
        about = {"strategy": name, "ranks": world.world_size, "millions": options.millions, "ms": times, "ratio": ratio}
        append(options.json, about | machine("cpu"))
    Console(width=100).print(table)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--millions", type=float, default=6.3, help="parameters of the transformer")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 32 tokens a rank")
    add_options(parser, repeats=9)
    options = parser.parse_args()
    launch.run(measure, (options,), world_size=options.world_size, backend="gloo")


if __name__ == "__main__":
    main()
