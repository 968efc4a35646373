"""Whole steps of learners that FSDP2 shards over two ranks, beside FSDP2's own steps without an average.

Contenders of one run take turns of 4 steps, A/B/A/B, each after a barrier, until ``--seconds`` are over. Wall time is
that of the slowest rank, CPU time the sum over the ranks and their threads, which other programs disturb less. The
model is a small transformer of about ``--millions`` parameters, the optimizer FusedAdamW. Memory is what tensors of a
rank hold after a step, in bytes for each parameter of its shards, beyond FSDP2 alone. With ``--transport shm`` it
counts the memory of the other learners, which each rank maps, too.

``PYTHONPATH=. python benchmarks/bench_sharded.py --world-size 4 --transport pg``
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import append
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import ddpcore
from ddpcore.optim import FusedAdamW
from ddpcore.runtime import launch
from ddpcore.runtime.machine import machine
from ddpcore.runtime.timing import quantiles

WIDTH, TOKENS = 256, 32
TURN = 4  # steps: a period of local steps
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
STRATEGIES: dict[str, Callable[[], Any] | None] = {
    "FSDP2 alone": None,
    "dpsgd": ddpcore.DPSGD,
    "local_sgd": partial(ddpcore.LocalSGD, TURN),
    "ssgd": ddpcore.SSGD,
    "diloco": partial(ddpcore.LocalSGD, TURN, outer=OUTER),
    "streaming": partial(ddpcore.LocalSGD, TURN, outer=OUTER, fragments=2, overlap=1, alpha=0.5),
    "slowmo": partial(ddpcore.SlowMo, period=TURN),
    "noloco": partial(ddpcore.NoLoCo, period=TURN),
    "gasloc": partial(ddpcore.GASLoC, period=TURN),
    "push_sum": partial(ddpcore.PushSum, ddpcore.OnePeerExponential()),
    "exact_diffusion": ddpcore.ExactDiffusion,
    "gradient_tracking": ddpcore.GradientTracking,
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
        connection = ddpcore.Connection(transport=options.transport)
        ddpcore.distribute(trained, optimizer, make(), group=mesh["learners"], connection=connection)
    inputs = torch.randn(options.batch, TOKENS, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        trained(inputs).square().mean().backward()
        optimizer.step()

    return step


def held() -> dict[int, Any]:
    """All memory that tensors of this process use, by address."""
    gc.collect()
    found = [getattr(one, "_local_tensor", one) for one in gc.get_objects() if issubclass(type(one), Tensor)]
    storages = [one.untyped_storage() for one in found]
    return {storage.data_ptr(): storage for storage in storages}


def run_turn(step: Callable[[], Any]) -> tuple[float, float]:
    """Seconds a step of the wall clock, of the slowest rank, and of the CPU, of all ranks together."""
    dist.barrier()
    wall, used = time.perf_counter(), time.process_time()
    for _ in range(TURN):
        step()
    spent = torch.tensor([time.perf_counter() - wall, time.process_time() - used], dtype=torch.float64) / TURN
    dist.all_reduce(spent[:1], dist.ReduceOp.MAX)
    dist.all_reduce(spent[1:])
    return float(spent[0]), float(spent[1])


def measure(world: launch.World, options: argparse.Namespace) -> None:
    """Run on every rank by ``launch.run``; rank 0 prints."""
    start = time.monotonic()
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (world.world_size // 2, 2), mesh_dim_names=("learners", "shard"))
    numel = sum(local.numel() for local in map(local_part, model(options.millions, mesh["shard"]).parameters()))
    steps: dict[str, Callable[[], Any]] = {}
    memory: dict[str, float] = {}
    for name in ("FSDP2 alone", *options.strategies):
        before = held()  # alive, so that no address is used again
        steps[name] = step_of(name, options, mesh)
        run_turn(steps[name])  # warms up, and makes all state
        memory[name] = sum(one.nbytes() for address, one in held().items() if address not in before) / numel
    turns: list[list[tuple[float, float]]] = []
    while len(turns) < 2 or is_time(start, options.seconds):
        turns.append([run_turn(step) for step in steps.values()])
    if world.rank:
        return
    table = Table(
        title=f"{world.world_size} ranks on {machine('cpu')['cores']} cores, {options.millions:g} M parameters, "
        f"{options.transport}, {len(turns)} turns; ratios to FSDP2 alone, p20/p50/p80"
    )
    for heading in ("strategy", "wall, ms", "ratio", "CPU, ms", "ratio", "bytes beyond"):
        table.add_column(heading, no_wrap=True)
    spent = torch.tensor(turns, dtype=torch.float64)
    for column, name in enumerate(steps):
        about: dict[str, Any] = {"strategy": name, "ranks": world.world_size, "millions": options.millions}
        about["bytes"] = memory[name] - memory["FSDP2 alone"]
        cells = []
        for clock, kind in enumerate(("wall", "cpu")):
            mine, alone = spent[:, column, clock], spent[:, 0, clock]
            about[f"{kind}_ms"] = quantiles((1e3 * mine).tolist())
            about[f"{kind}_ratio"] = quantiles((mine / alone).tolist())
            cells += [shown(about[f"{kind}_ms"], 0), shown(about[f"{kind}_ratio"], 2)]
        table.add_row(name, *cells, f"{about['bytes']:.1f}")
        append(options.json, about | machine("cpu"))
    Console(width=120).print(table)


def local_part(parameter: Any) -> Tensor:
    """This rank's shard."""
    part: Tensor = parameter.to_local()
    return part


def is_time(start: float, seconds: float) -> bool:
    """Whether rank 0 has time for another turn of all."""
    left = torch.tensor([float(time.monotonic() - start < seconds)])
    dist.broadcast(left, 0)
    return bool(left)


def shown(values: dict[str, float], digits: int) -> str:
    """Three quantiles."""
    return "/".join(f"{values[name]:.{digits}f}" for name in ("p20", "p50", "p80"))


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--millions", type=float, default=6.3, help="parameters of the transformer")
    parser.add_argument("--batch", type=int, default=2, help="sequences of 32 tokens a rank")
    parser.add_argument("--strategies", nargs="*", choices=list(STRATEGIES)[1:], default=["dpsgd", "local_sgd"])
    parser.add_argument("--transport", default="auto", help="between learners, see docs/transports.md")
    parser.add_argument("--seconds", type=float, default=90, help="of warm-up and measurement; 2 turns at least")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows to this file")
    options = parser.parse_args()
    launch.run(measure, (options,), world_size=options.world_size, backend="gloo")


if __name__ == "__main__":
    main()
