"""``python -m ddpcore.bench comm``: latency and bandwidth of each operation over each transport, checked."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ddpcore.bench import command_line
from ddpcore.bench.command_line import check_names, flag, names, option, write_json
from ddpcore.bench.config import BenchConfig, Plan
from ddpcore.bench.contender import barrier
from ddpcore.bench.environment import environment, free_memory
from ddpcore.bench.job import Job, settle_real
from ddpcore.comm import Communicator, choose_transport, connect
from ddpcore.comm.choice import TRANSPORTS
from ddpcore.flat import MiB
from ddpcore.launch import World
from ddpcore.metrics import to_json
from ddpcore.report.comm import print_comm
from ddpcore.topology import RandomPair, Ring, Topology

ALL = tuple(name for name in TRANSPORTS if name != "auto")
SMALLEST_BYTES = 32 * 2**10
FACTOR = 8  # from one size to the next
PATTERN = 251  # values that repeat, so that data at the wrong place are wrong
PIECE = 2**20  # elements that are checked at a time
FEWEST, MOST = 5, 500  # repeats
BUFFERS = 5  # of one size that a transport holds at once, with what it keeps and receives


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """What is measured. Constructing one checks all that can be known before.

    Raises:
        ValueError: one line that says what is wrong and what to do.
    """

    world_size: int | None = option(None, "number of ranks (4, or torchrun's)", type=int)
    transport: tuple[str, ...] | None = option(
        None, f"comma-separated, of {','.join(ALL)} (those that run here)", metavar="A,B,...", type=names
    )
    max_mib: float = option(256.0, "largest message, MiB", type=float)
    seconds: float = option(0.5, "for each operation, size and transport, about; five repeats at least", type=float)
    device: str = option("auto", "auto, cpu, cuda")
    json: Path | None = option(None, "write the result to this file", type=Path, metavar="FILE")

    def __post_init__(self) -> None:
        if self.transport is not None:
            check_names("transport", self.transport, ALL, "transport")
        for name in ("max_mib", "seconds"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{flag(name)} is {getattr(self, name)}: it must be a number above 0")
        if self.max_mib * MiB < SMALLEST_BYTES:
            raise ValueError(f"--max-mib is {self.max_mib}: it must be at least {SMALLEST_BYTES / MiB}")
        self.bench(started=1)

    def bench(self, started: int) -> BenchConfig:
        """Device and world as a training bench has them, of ``started`` ranks where none are asked for.

        Raises:
            ValueError: there is no such bench.
        """
        batch_size = self.world_size or started
        return BenchConfig(world_size=self.world_size, device=self.device, json=self.json, batch_size=batch_size)


def sizes(max_mib: float) -> list[int]:
    """Bytes of the messages: by factors of FACTOR, and the largest."""
    largest = int(max_mib * MiB) // 16 * 16
    steps = [SMALLEST_BYTES * FACTOR**power for power in range(64)]
    return [*(size for size in steps if size < largest), largest]


def prepare(argv: Sequence[str], joined: World | None) -> Job:
    """What the command line says, checked before any process starts.

    Raises:
        ValueError: it cannot be run as it stands; one line.
    """
    config = command_line.parse(
        CommConfig,
        argv,
        prog="python -m ddpcore.bench comm",
        description="Time averages and exchanges of many sizes over each transport, and check what arrives.",
    )
    plan = settle_real(config.bench(started=4 if joined is None else joined.world_size), joined)
    hosts = 1 if joined is None else -(-joined.world_size // joined.local_world_size)
    chosen = []
    for name in ALL if config.transport is None else config.transport:
        try:
            choose_transport(name, world_size=plan.world_size, device=plan.device, num_hosts=hosts)
            chosen.append(name)
        except ValueError:
            if config.transport is not None:
                raise
    _check_memory(config, plan, len(chosen))
    args = (plan, config, tuple(chosen))
    return Job(worker=run_rank, args=args, world_size=plan.world_size, backend=plan.choice.backend)


class Lane:
    """One transport and a row that it carries: of rank r, a pattern plus r.

    Attributes:
        rows: ``[1, x]``, where the connection averages best.
    """

    def __init__(self, transport: str, numel: int, device: torch.device) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.transport, self.device = transport, device
        self.comm: Communicator = connect(group, transport, device)
        self.rows = self.comm.allocate((1, numel), torch.float32, device)
        self.num_steps = 0

    def fill(self) -> None:
        """The values that are checked."""
        for piece, values in pieces(self.rows[0]):
            piece.copy_(values + self.comm.learners[0])

    def all_reduce(self) -> None:
        """The mean over all ranks, in place."""
        self.comm.average_(self.rows).wait()

    def exchange(self, topology: Topology) -> list[Tensor]:
        """The neighbours' rows, once they are here."""
        mixture = self.comm.exchange(self.rows, topology, self.num_steps).mixture()
        assert mixture is not None, "real ranks hand over what they received"
        self.num_steps += 1
        return list(mixture.peers)

    def mix(self, topology: Topology) -> None:
        """The weighted average with the neighbours, in place."""
        self.comm.exchange(self.rows, topology, self.num_steps).mix_()
        self.num_steps += 1


def pieces(row: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """A row piece by piece, each with the pattern that belongs there, so that checking takes little memory."""
    pattern = torch.arange(PATTERN, dtype=torch.float32, device=row.device).repeat(-(-PIECE // PATTERN) + 1)
    for begin in range(0, len(row), PIECE):
        piece = row[begin : begin + PIECE]
        yield piece, pattern[begin % PATTERN :][: len(piece)]


def num_wrong(row: Tensor, offset: float) -> int:
    """Elements that are not the pattern plus ``offset``, up to a rounding of float32."""
    wrong = 0
    for piece, values in pieces(row):
        wrong += len(piece) - int(torch.isclose(piece, values + offset, rtol=1e-5, atol=1e-5).sum())
    return wrong


@dataclass(frozen=True)
class Operation:
    """What is measured of a lane.

    Attributes:
        topology: None of the average of all.
        mixes: whether the neighbours' rows are averaged, or only received.
    """

    name: str
    topology: Topology | None = None
    mixes: bool = False

    def call(self, lane: Lane) -> list[Tensor]:
        """Run it; the rows that came out."""
        if self.topology is None:
            lane.all_reduce()
        elif self.mixes:
            lane.mix(self.topology)
        else:
            return lane.exchange(self.topology)
        return [lane.rows[0]]

    def offsets(self, rank: int, world_size: int, step: int) -> list[float]:
        """What the rows that come out must be, beyond the pattern."""
        if self.topology is None:
            return [(world_size - 1) / 2]
        plan = self.topology.round(step, rank, world_size)
        if not self.mixes:
            return [float(source) for source in plan.sources]
        weighted = zip(plan.weights, plan.sources, strict=True)
        return [plan.self_weight * rank + sum(weight * source for weight, source in weighted)]

    def bus_factor(self, world_size: int) -> float:
        """Bytes that a rank sends over those of its row: 2(n-1)/n, as nccl-tests has it, or its neighbours."""
        if self.topology is None:
            return 2 * (world_size - 1) / world_size
        rounds = [self.topology.round(0, rank, world_size) for rank in range(world_size)]
        return float(max(len(plan.destinations) for plan in rounds))


OPERATIONS = (
    Operation("all-reduce"),
    Operation("exchange pair", RandomPair(seed=0)),
    Operation("exchange ring", Ring()),
    Operation("mix pair", RandomPair(seed=0), mixes=True),
    Operation("mix ring", Ring(), mixes=True),
)


def run_rank(world: World, plan: Plan, config: CommConfig, transports: tuple[str, ...]) -> None:
    """The worker of :func:`ddpcore.launch.run`; rank 0 prints and writes.

    Raises:
        RuntimeError: on every rank, what arrived was wrong.
    """
    device = torch.device(plan.device)
    notes: list[str] = []
    rows = []
    for num_bytes in sizes(config.max_mib):
        lanes = _lanes(transports, num_bytes // 4, device, notes)
        rows += [row for operation in OPERATIONS for row in _measure(operation, lanes, config.seconds)]
        del lanes  # with the buffers that a connection keeps for each size
        gc.collect()
    if world.rank == 0:
        where = environment(plan)
        where = {**where, "transport": None, "transport_reason": None, "notes": where["notes"] + notes}
        result = {"environment": where, "world_size": plan.world_size, "rows": rows}
        print_comm(to_json(result))
        if config.json is not None:
            write_json(config.json, result)
    wrong = sorted({f"{row['op']} over {row['transport']}" for row in rows if row["num_wrong"]})
    if wrong:
        raise RuntimeError(f"wrong values arrived: {', '.join(wrong)}")


def _lanes(transports: Sequence[str], numel: int, device: torch.device, notes: list[str]) -> list[Lane]:
    lanes = []
    for name in transports:
        try:
            lanes.append(Lane(name, numel, device))
        except ValueError as error:  # on every rank alike
            note = f"{name} is left out: {error}"
            notes += [] if note in notes else [note]
    return lanes


@torch.no_grad()
def _measure(operation: Operation, lanes: list[Lane], seconds: float) -> list[dict[str, Any]]:
    """A row a lane; lanes take turns. Collective."""
    wrong, once = [], []
    for lane in lanes:
        lane.fill()
        rank, world_size = lane.comm.learners[0], lane.comm.num_learners
        offsets = operation.offsets(rank, world_size, lane.num_steps)
        found = operation.call(lane)
        wrong.append(sum(num_wrong(row, offset) for row, offset in zip(found, offsets, strict=True)))
        del found
        once.append(_time(operation, lane))
    # Every rank must do as many repeats: the slowest one's time decides.
    slowest = _over_ranks(torch.tensor(once, dtype=torch.float64), dist.ReduceOp.MAX).tolist()
    total_wrong = _over_ranks(torch.tensor(wrong, dtype=torch.float64), dist.ReduceOp.SUM).tolist()
    repeats = max(FEWEST, min(MOST, round(len(lanes) * seconds / max(sum(slowest), 1e-9))))
    times = torch.tensor([[_time(operation, lane) for lane in lanes] for _ in range(repeats)], dtype=torch.float64)
    times = _over_ranks(times, dist.ReduceOp.MAX)
    return [
        row_of(operation, lane, times[:, index].tolist(), int(total_wrong[index])) for index, lane in enumerate(lanes)
    ]


def _time(operation: Operation, lane: Lane) -> float:
    """Seconds from a meeting of all ranks until this one has its result."""
    barrier()
    start = time.perf_counter()
    operation.call(lane)
    if lane.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _over_ranks(values: Tensor, how: Any) -> Tensor:
    where = values.cuda() if dist.get_backend() == "nccl" else values
    dist.all_reduce(where, how)
    return where.cpu()


def row_of(operation: Operation, lane: Lane, seconds: list[float], wrong: int) -> dict[str, Any]:
    """What the JSON file holds; bandwidths are of the median."""
    middle, late = np.quantile(seconds, (0.5, 0.99)).tolist()
    count = lane.rows.numel()
    size = count * lane.rows.element_size()
    return {
        "op": operation.name,
        "transport": lane.transport,
        "size_bytes": size,
        "count": count,
        "type": "float",
        "time_us": {"p50": 1e6 * middle, "p99": 1e6 * late},
        "algbw_gb_per_s": size / middle / 1e9,
        "busbw_gb_per_s": size / middle / 1e9 * operation.bus_factor(lane.comm.num_learners),
        "num_wrong": wrong,
        "repeats": len(seconds),
    }


def _check_memory(config: CommConfig, plan: Plan, num_transports: int) -> None:
    """A machine that runs out of memory kills ranks without a word."""
    ranks = plan.world_size if plan.device == "cpu" else 1
    per_mib = ranks * num_transports * BUFFERS * MiB
    free = free_memory(plan.device)
    if config.max_mib * per_mib > free:
        raise ValueError(
            f"messages of {config.max_mib:g} MiB need about {config.max_mib * per_mib / 1e9:.1f} GB of memory and "
            f"{free / 1e9:.1f} GB are free: take --max-mib {max(1, int(free / per_mib))}, or name one --transport"
        )
