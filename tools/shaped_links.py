"""Utilisation of four learners whose links carry few bits: all-reduce, and gossip with one other learner.

Each learner is a rank on a network namespace of its own. ``tc`` (tbf) shapes what leaves it, and gloo sends over TCP.
The rank computes a real gradient and sleeps until ``--step-ms``, so that ranks that share cores have the steps of a
larger network. Utilisation is the time of the same steps without communication, divided by their time with it.

``--scale 10`` takes a tenth of the weights and of the bandwidth, so that all times stay and the processor has a tenth
of the bytes to copy. The default model is the one of github.com/Adnan082/diloco-measured.

``PYTHONPATH=.:tests python tools/shaped_links.py --scale 10 --json benchmarks/results/shaped_links_cpu.jsonl``
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ddpcore
from ddpcore.bench.step_model import Compute, Step, Transfer, predict
from ddpcore.comm import Link
from ddpcore.runtime import launch
from ddpcore.runtime.launch import World
from ddpcore.runtime.machine import machine
from helpers import hosts

NUM_RANKS = 4
PARAMETERS, STEP_MS = 30_846_720, 25.3  # of diloco-measured, four L40S
BURST_SECONDS, QUEUE_SECONDS = 0.002, 0.05  # of the rate: what tbf lets pass at once, and what may wait
PROBE_SECONDS = 2.0  # of the test of the shaped bandwidth


def strategies(period: int) -> dict[str, ddpcore.Strategy]:
    """All-reduce and gossip that communicate every ``period`` steps."""
    pair = ddpcore.RandomPair(seed=0)
    if period == 1:
        return {"all-reduce": ddpcore.SSGD(), "gossip": ddpcore.DPSGD(pair)}
    return {"all-reduce": ddpcore.LocalSGD(period), "gossip": ddpcore.LocalSGD(period, topology=pair)}


def utilisation(name: str, period: int, step_seconds: float, num_bytes: float, link: Link) -> float:
    """By the chain of docs/predict.md: all-reduce is a ring, and gossip in each step is hidden by the computation."""
    n = NUM_RANKS
    ring = 2 * (n - 1) / n * num_bytes * 8 / link.bits_per_second + 2 * (n - 1) * link.delay
    sent = Transfer(seconds=ring if name != "gossip" else num_bytes * 8 / link.bits_per_second + link.delay)
    third = step_seconds / 3
    compute = Compute(forward=third, backward=2 * third, update=0.0, cpu=0.0, arrivals=((1, 1.0),))
    if period > 1:
        last = Step(after=sent)
    else:
        last = Step(hidden=sent) if name == "gossip" else Step(messages=[sent], sizes=[1])
    steps = [*[Step()] * (period - 1), last]
    return step_seconds / predict(compute, steps, cores=math.inf, background=True)


def shape(device: str, bits_per_second: float) -> None:
    """Limit what leaves a device."""
    burst = max(8192, round(bits_per_second / 8 * BURST_SECONDS))
    queue = burst + max(65_536, round(bits_per_second / 8 * QUEUE_SECONDS))
    words = ["tbf", "rate", f"{round(bits_per_second)}bit", "burst", f"{burst}b", "limit", f"{queue}b"]
    subprocess.run(["tc", "qdisc", "replace", "dev", device, "root", *words], check=True)


def probe(rank: int, bits_per_second: float) -> float:
    """Bits per second that each rank sends to the next one, all at once; the slowest."""
    message = torch.zeros(round(bits_per_second / 8 * PROBE_SECONDS / 4))
    received = torch.empty_like(message)
    dist.barrier()
    start = time.perf_counter()
    works = [dist.isend(message, (rank + 1) % NUM_RANKS), dist.irecv(received, (rank - 1) % NUM_RANKS)]
    for work in works:
        work.wait()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return 32 * message.numel() / seconds.item()


class Job:
    """The training of one rank with one strategy, or alone."""

    def __init__(self, strategy: ddpcore.Strategy | None, args: argparse.Namespace) -> None:
        width = max(1, round((PARAMETERS / args.scale) ** 0.5))
        torch.manual_seed(0)
        self.model = nn.Linear(width, width, bias=False)
        self.optimizer = ddpcore.optim.FusedSGD(self.model.parameters(), lr=1e-4)
        self.inputs, self.step_seconds = torch.randn(1, width), args.step_ms / 1e3
        self.num_bytes = 4 * width * width
        if strategy is not None:
            connection = ddpcore.Connection(transport="pg", timeout=600.0)
            ddpcore.distribute(self.model, self.optimizer, strategy, connection=connection)

    def seconds(self, num_steps: int) -> float:
        """Of these steps, until the slowest rank is done. Collective."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num_steps):
            end = time.perf_counter() + self.step_seconds
            self.optimizer.zero_grad()
            loss = self.model(self.inputs).square().mean()
            time.sleep(max(0.0, end - time.perf_counter()))
            loss.backward()
            self.optimizer.step()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.item()


def run_rank(world: World, keepers: Sequence[int], args: argparse.Namespace) -> None:
    """What each rank runs; rank 0 prints and writes."""
    hosts.enter(keepers[world.rank], world.rank)
    torch.set_num_threads(1)
    store = dist.TCPStore(hosts.address(0), hosts.PORT, NUM_RANKS, is_master=world.rank == 0)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=NUM_RANKS)
    alone, rows = Job(None, args), []
    alone.seconds(5)
    for mbit in args.mbit:
        link = Link(bits_per_second=mbit * 1e6 / args.scale, delay=0.0)
        shape(hosts.device(world.rank), link.bits_per_second)
        found = probe(world.rank, link.bits_per_second)
        for period in args.periods:
            for name, strategy in strategies(period).items():
                job = Job(strategy, args)
                about = period * job.step_seconds / utilisation(name, period, job.step_seconds, job.num_bytes, link)
                num_steps = period * max(2, math.ceil(args.seconds / about))
                step = alone.seconds(max(20, min(num_steps, 80))) / max(20, min(num_steps, 80))
                measured = step / (job.seconds(num_steps) / num_steps)
                predicted = utilisation(name, period, step, job.num_bytes, link)
                row = {"mbit": mbit, "probed_mbit": found * args.scale / 1e6, "strategy": name, "period": period}
                row |= {"steps": num_steps, "step_ms": 1e3 * step, "measured": measured, "predicted": predicted}
                rows.append(row)
                if world.rank == 0:
                    print(
                        f"{mbit:6g} Mb/s (found {row['probed_mbit']:.0f})  H {period:4}  {name:10} measured "
                        f"{measured:8.3%}  predicted {predicted:8.3%}  ratio {predicted / measured:.2f}",
                        flush=True,
                    )
    if world.rank == 0 and args.json is not None:
        about = {**machine("cpu"), **vars(args)}
        line = json.dumps({"about": {key: str(value) for key, value in about.items()}, "rows": rows})
        with args.json.open("a") as file:
            file.write(line + "\n")
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[50.0, 1000.0, 5000.0], help="Mb/s, before --scale")
    parser.add_argument("--periods", type=int, nargs="+", default=[1, 8, 32, 128], help="H")
    parser.add_argument("--scale", type=float, default=10.0)
    parser.add_argument("--step-ms", type=float, default=STEP_MS)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement, at least two rounds")
    parser.add_argument("--json", type=Path, default=None, help="append to this file")
    args = parser.parse_args()
    with hosts.networks(NUM_RANKS) as keepers:
        launch.run(run_rank, (keepers, args), world_size=NUM_RANKS, backend="none")


if __name__ == "__main__":
    main()
