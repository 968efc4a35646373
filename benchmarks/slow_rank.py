"""One rank of four is slower than the others: how much of their own speed the others keep.

Each rank trains a network of ``--parameters`` weights. A step computes a gradient and then sleeps up to ``--step-ms``,
so that ranks that share cores have the steps of a larger network. On the last rank it lasts ``1 / --speed`` as long.
``alone`` steps without any communication. Strategies take turns, in blocks of ``--seconds``. In a block, ranks that
wait for others all take as many steps as the slow one has time for. The others count their steps until the time is up.
A rate is that of a rank's own steps.

``PYTHONPATH=. python benchmarks/slow_rank.py --seconds 5 --rounds 3``
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddpcore
from ddpcore.runtime import launch
from ddpcore.runtime.launch import World
from ddpcore.runtime.machine import machine

MAKERS: dict[str, Any] = {
    "alone": lambda: None,
    "adpsgd": ddpcore.ADPSGD,
    "dpsgd random_pair": lambda: ddpcore.DPSGD(ddpcore.RandomPair()),
    "dpsgd ring": lambda: ddpcore.DPSGD(ddpcore.Ring()),
    "ssgd": ddpcore.SSGD,
}


class Job:
    """The training of one rank with one strategy."""

    def __init__(self, name: str, world: World, args: argparse.Namespace) -> None:
        width = max(1, round(args.parameters**0.5))
        torch.manual_seed(0)
        self.model = nn.Linear(width, width, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.inputs = torch.randn(8, width)
        slowness = 1 / args.speed if world.rank == world.world_size - 1 else 1.0
        self.step_seconds = slowness * args.step_ms / 1e3
        strategy = MAKERS[name]()
        self.waits = strategy is not None and strategy.traits.waits
        if strategy is not None:
            ddpcore.distribute(self.model, self.optimizer, strategy, connection=ddpcore.Connection(transport="shm"))

    def step(self) -> None:
        """One step of training."""
        end = time.perf_counter() + self.step_seconds
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()
        time.sleep(max(0.0, end - time.perf_counter()))
        self.optimizer.step()

    def steps_per_second(self, seconds: float) -> float:
        """Of this rank. Collective."""
        for _ in range(3):
            self.step()
        num_steps = None
        if self.waits:
            shortest = torch.tensor([max(2, round(seconds / self.step_seconds))])
            dist.all_reduce(shortest, op=dist.ReduceOp.MIN)
            num_steps = int(shortest)
        dist.barrier()
        begin, done = time.perf_counter(), 0
        while done < num_steps if num_steps is not None else time.perf_counter() - begin < seconds:
            self.step()
            done += 1
        rate = done / (time.perf_counter() - begin)
        dist.barrier()
        return rate


def run_rank(world: World, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    jobs = {name: Job(name, world, args) for name in MAKERS}
    mine = [[job.steps_per_second(args.seconds) for job in jobs.values()] for _ in range(args.rounds)]
    rates_NRS = [torch.zeros(args.rounds, len(jobs)) for _ in range(world.world_size)]
    dist.all_gather(rates_NRS, torch.tensor(mine))
    if world.rank == 0:
        report(torch.stack(rates_NRS), args)


def report(rates_NRS: torch.Tensor, args: argparse.Namespace) -> None:
    """N ranks, R rounds, S strategies: medians over the rounds; shares are of ``alone`` in the same round."""
    rows = []
    for column, name in enumerate(MAKERS):
        shares = (rates_NRS[:-1, :, column] / rates_NRS[:-1, :, 0]).mean(dim=0)  # of the ranks that are not slow
        fast = rates_NRS[:-1, :, column].mean(dim=0).tolist()
        slow = rates_NRS[-1, :, column].tolist()
        row = {"strategy": name, "fast": statistics.median(fast), "slow": statistics.median(slow)}
        rows.append(row | {"share": shares.median().item(), "shares": [round(x, 3) for x in shares.tolist()]})
    about = {**machine("cpu"), **vars(args)}
    print(f"{args.ranks} ranks, the last at {args.speed:g} of the speed; steps of {args.step_ms:g} ms")
    print(f"{'strategy':20}{'fast steps/s':>14}{'slow steps/s':>14}{'of alone':>10}   rounds")
    for row in rows:
        print(f"{row['strategy']:20}{row['fast']:14.1f}{row['slow']:14.1f}{row['share']:10.3f}   {row['shares']}")
    if args.json is not None:
        args.json.write_text(json.dumps({"about": {k: str(v) for k, v in about.items()}, "rows": rows}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--speed", type=float, default=0.5, help="of the last rank")
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    launch.run(run_rank, (args,), world_size=args.ranks, backend="gloo")


if __name__ == "__main__":
    main()
