"""One of several ranks with ``transport="symmetric"``: training, and a drawn list of exchanges and averages."""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

import ddpcore
from ddpcore import Round, Topology, ops
from ddpcore.comm.base import Exchange, Work
from ddpcore.comm.reductions import sum_of
from ddpcore.comm.shared.symmetric import SymmetricCommunicator
from ddpcore.topology.rounds import uniform
from helpers.oracle import Case, train
from helpers.ranks import join

CASES = [
    Case(strategy, topology, world_size, optimizer)
    for world_size in (2, 4)
    for strategy, topology, optimizer in (
        ("ssgd", "all_gather", "fused"),
        ("ssgd", "all_gather", "torch"),
        ("local_sgd", "all_gather", "fused"),
        ("streaming", "all_gather", "fused"),
        ("dpsgd", "ring", "fused"),
        ("dpsgd", "random_pair", "torch"),
        ("dpsgd", "hierarchical", "fused"),
        ("dpsgd", "from_matrix", "fused"),
        ("dpsgd_stale", "ring", "fused"),
        ("dpsgd_stale", "random_pair", "fused"),
        ("dpsgd_atc", "random_pair", "fused"),
        ("dpsgd_atc", "ring", "torch"),
        ("dpsgd_int8_stale", "ring", "fused"),
        ("push_sum", "one_peer_exponential", "fused"),
        ("tracking", "ring", "fused"),
        ("grouped", "all_gather", "fused"),
    )
] + [Case("push_sum", "digraph", 4, "fused"), Case("dpsgd", "ring", 4, "fused", "batch_norm")]
KINDS = ((1000, torch.float32), (77, torch.bfloat16))  # of rows that are exchanged
NUM_EVENTS = 120
MOST = 3  # exchanges in progress at once


class Drawn(Topology):
    """At each step other readers, of any number, which need not send anything back."""

    @override
    def round(self, step: int, rank: int, num_learners: int) -> Round:
        drawn = random.Random(step)
        edges = [pair for pair in itertools.permutations(range(num_learners), 2) if drawn.random() < 0.4]
        return uniform([source for source, to in edges if to == rank], [to for source, to in edges if source == rank])

    @override
    def period(self, num_learners: int) -> None:
        return None


def row_of(rank: int, event: int, numel: int, dtype: torch.dtype) -> Tensor:
    """The row of a rank at an event, which every rank can make."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * event + rank)).to(dtype)


class Events:
    """A drawn list of calls, the same on all ranks. Each result is compared with what its rows would give alone.

    Args:
        comm: the connection.
        device: of the rows.
        pause: takes up to so many milliseconds of the current stream, another time on each rank.
    """

    def __init__(self, comm: SymmetricCommunicator, device: torch.device, pause: Callable[[int], object]) -> None:
        self.comm, self.device, self.pause = comm, device, pause
        self.exchanges: list[tuple[int, Exchange, Tensor]] = []
        self.averages: list[tuple[int, Work, Tensor]] = []
        self.free = [comm.allocate((1, 300), dtype, device) for dtype in (torch.float32, torch.bfloat16) * 2]
        self.wrong: list[str] = []
        self.num_done = 0

    def run(self, seed: int) -> None:
        drawn = random.Random(seed)
        for event in range(NUM_EVENTS):
            self.pause(2)
            kind = drawn.choice(("exchange", "end", "average", "wait"))
            how = drawn.choice(("mixture", "mixture", "abandon", "quarantine", "rows"))
            numel, dtype = drawn.choice(KINDS)
            if kind == "exchange" and len(self.exchanges) < MOST:
                weights = self._row(event, numel, dtype)[None]
                self.exchanges.append((event, self.comm.exchange_in_place(weights, Drawn(), event), weights))
            elif kind == "end" and self.exchanges:
                self._end(how)
            elif kind == "average" and self.free:
                rows = self.free.pop(0)
                rows.copy_(self._row(event, 300, rows.dtype)[None])
                self.averages.append((event, self.comm.average_(rows, event), rows))
            elif kind == "wait" and self.averages:
                self._wait()
        while self.exchanges:
            self._end("mixture")
        while self.averages:
            self._wait()

    def _row(self, event: int, numel: int, dtype: torch.dtype, rank: int | None = None) -> Tensor:
        return row_of(self.comm.rank if rank is None else rank, event, numel, dtype).to(self.device)

    def _end(self, how: str) -> None:
        event, exchange, weights = self.exchanges.pop(0)
        round_ = Drawn().round(event, self.comm.rank, self.comm.num_learners)
        expected, numel = weights.clone(), weights.numel()
        sources = {source: self._row(event, numel, weights.dtype, source) for source in round_.sources}
        if how == "abandon":
            exchange.abandon()
        elif how == "rows":
            rows = exchange.rows(weights)
            self.pause(30)
            pairs = {source: (rows[source].clone(), row) for source, row in sources.items()}
            self.wrong += [f"row of {source} at {event}" for source, pair in pairs.items() if not torch.equal(*pair)]
        else:
            if how == "quarantine":
                exchange.quarantine({self.comm.rank} if event % 2 == self.comm.rank % 2 else set())
                round_ = round_.without_self() if event % 2 == self.comm.rank % 2 else round_
            average = exchange.mixture()
            self.pause(30)
            average.apply_(weights)
            ops.mix_(expected[0], list(sources.values()), round_.self_weight, round_.weights)
            self._compare(f"{how} at {event}", weights, expected)
        self.num_done += 1

    def _wait(self) -> None:
        event, work, rows = self.averages.pop(0)
        work.wait()
        numel = rows.numel()
        everyone = [self._row(event, numel, rows.dtype, rank) for rank in range(self.comm.num_ranks)]
        self._compare(f"average at {event}", rows[0], sum_of(everyone).div_(len(everyone)).to(rows.dtype))
        self.free.append(rows)
        self.num_done += 1

    def _compare(self, what: str, ours: Tensor, theirs: Tensor) -> None:
        if not torch.equal(ours, theirs):
            self.wrong.append(f"{what} of {ours.numel()} {ours.dtype}")


def events_of(device: torch.device, pause: Callable[[int], object], seed: int) -> tuple[SymmetricCommunicator, Events]:
    comm = SymmetricCommunicator(None, device, timeout=60.0)
    events = Events(comm, device, pause)
    events.run(seed)
    return comm, events


def captured(device: torch.device) -> list[Tensor]:
    """The weights after each replay of a graph of two exchanges and an average, and after as many steps without one."""
    comm = SymmetricCommunicator(None, device, timeout=60.0)
    ends = []
    for replays in (0, 3):
        weights = comm.allocate((1, 1000), torch.float32, device)
        weights.copy_(row_of(comm.rank, 0, 1000, torch.float32))

        def two(weights: Tensor = weights) -> None:
            for _ in range(2):
                exchange = comm.exchange(weights, ddpcore.Ring(), 0)
                exchange.mixture().apply_(weights)
                weights.mul_(1.0 + comm.rank)
            work = comm.average_(weights[:, :500])
            weights[:, 500:] += 1
            work.wait()

        two(), two()
        if replays:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                two()
        for _ in range(3):
            graph.replay() if replays else two()
        ends.append(weights.cpu())
    return ends


def main() -> None:
    num_gpus, world_size = torch.cuda.device_count(), int(sys.argv[2])
    if num_gpus < world_size:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    path, rank, _ = join()
    device = torch.device("cuda", rank % num_gpus)
    torch.cuda.set_device(device)
    delays = random.Random(rank)
    seen: dict[Any, Any] = {}
    _, events = events_of(device, lambda most: torch.cuda._sleep(delays.randrange(10**6 * most)), seed=0)
    seen["wrong"], seen["done"], seen["captured"] = events.wrong, events.num_done, captured(device)
    for case in CASES:
        if case.world_size == world_size:
            seen[tuple(case)] = train(case, dist.group.WORLD, transport="symmetric", device=device)
    torch.save(seen, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
