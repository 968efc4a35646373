"""Optimizer steps of several ranks: Muon that shares its matrices, and LARS and LAMB on shards of each tensor.

``muon``: ranks with the same gradients. Each orthogonalizes its share of the matrices and the ranks gather the results;
the baseline is ``torch.optim.Muon``, which computes all matrices on each rank.

``sgd``, ``adamw``, ``lars``, ``lamb``: the parameters are DTensors, each of which has a shard of ``--model`` on this
rank. The baseline steps the same shards as plain tensors, with norms of the shards, so without an all-reduce. The
all-reduce of one step is timed alone and subtracted.

All run in turn, A/B/A/B, each after a barrier. A time is that of the slowest rank. On the CPU, by gloo.

``PYTHONPATH=. python benchmarks/bench_rank_steps.py --world-size 4 --optimizers muon --layers 4``
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import add_options, append
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ddpcore.models import MODELS
from ddpcore.optim import OPTIMIZERS, Muon
from ddpcore.runtime import launch
from ddpcore.runtime.machine import machine
from ddpcore.runtime.timing import quantiles

WARM_UP = 2
WIDTH = 192


def with_gradient(tensor: Tensor, grad: Tensor) -> nn.Parameter:
    """A parameter."""
    param = nn.Parameter(tensor)
    param.grad = grad
    return param


def matrices(layers: int) -> list[nn.Parameter]:
    """Those of the layers of ViT-Ti, the same on each rank."""
    torch.manual_seed(0)
    shapes = [(WIDTH, WIDTH)] * 4 + [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
    return [with_gradient(torch.randn(shape), torch.randn(shape)) for shape in shapes * layers]


def muon(layers: int) -> dict[str, Callable[[], Any]]:
    """Ours, then the baseline."""
    ours = Muon(matrices(layers), lr=1e-3, process_group=dist.group.WORLD)
    return {"shared": ours.step, "torch.optim.Muon": torch.optim.Muon(matrices(layers), lr=1e-3).step}


def shards(name: str, model: str) -> dict[str, Callable[[], Any]]:
    """Ours on DTensors, on the same shards as plain tensors, and an all-reduce alone."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    plain, sharded = [], []
    for param in MODELS.build(model).parameters():
        numel = param.numel() // world  # of this rank
        for params, wrapped in (
            (plain, lambda part: part),
            (sharded, lambda part: DTensor.from_local(part, mesh, [Shard(0)])),
        ):
            params.append(with_gradient(wrapped(torch.randn(numel)), wrapped(torch.randn(numel))))
    sums = torch.zeros(len(plain), 2, dtype=torch.float64)
    turns = {
        "DTensors": OPTIMIZERS.build(name, sharded, lr=1e-3, weight_decay=1e-4).step,
        "plain": OPTIMIZERS.build(name, plain, lr=1e-3, weight_decay=1e-4).step,
    }
    return turns | ({"all-reduce": lambda: dist.all_reduce(sums)} if name in ("lars", "lamb") else {})


def measure(world: launch.World, options: argparse.Namespace) -> None:
    """Run on every rank by ``launch.run``; rank 0 prints."""
    torch.set_num_threads(1)
    table = Table(title=f"{world.world_size} ranks on {machine('cpu')['cores']} cores")
    for heading in ("optimizer", "ms p20/p50/p80", "ratio p20/p50/p80"):
        table.add_column(heading, no_wrap=True)
    for name in options.optimizers.split(","):
        turns = muon(options.layers) if name == "muon" else shards(name, options.model)
        seconds = torch.zeros(options.repeats + WARM_UP, len(turns), dtype=torch.float64)
        for repeat in range(options.repeats + WARM_UP):
            for column, turn in enumerate(turns.values()):
                dist.barrier()
                start = time.perf_counter()
                turn()
                seconds[repeat, column] = time.perf_counter() - start
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        ours, theirs, *sums = seconds[WARM_UP:].T
        beyond = ours - sums[0] if sums else ours
        ratio = quantiles((beyond / theirs).tolist())
        if world.rank == 0:
            times = {
                key: quantiles((1e3 * mine).tolist()) for key, mine in zip(turns, seconds[WARM_UP:].T, strict=True)
            }
            shown = "\n".join(
                f"{key}: {row['p20']:.1f}/{row['p50']:.1f}/{row['p80']:.1f}" for key, row in times.items()
            )
            table.add_row(name, shown, "/".join(f"{ratio[p]:.2f}" for p in ("p20", "p50", "p80")))
            about = {"optimizer": name, "ranks": world.world_size, "ms": times, "ratio": ratio, **machine("cpu")}
            append(options.json, about)
    if world.rank == 0:
        Console(width=100).print(table)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--optimizers", default="muon,sgd,adamw,lars,lamb", help="comma-separated")
    parser.add_argument("--model", default="resnet18", help="whose parameters are sharded")
    parser.add_argument("--layers", type=int, default=2, help="of ViT-Ti, whose matrices Muon steps")
    add_options(parser, repeats=7)
    options = parser.parse_args()
    launch.run(measure, (options,), world_size=options.world_size, backend="gloo")


if __name__ == "__main__":
    main()
