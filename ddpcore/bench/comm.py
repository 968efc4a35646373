"""``ddpcore bench comm``: latency and bandwidth of each operation over each transport, with checked data."""

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from ddpcore.bench import command
from ddpcore.bench.config import BenchConfig, Options, ResolvedConfig, resolve_device
from ddpcore.bench.contender import gather
from ddpcore.bench.isolated import time_calls
from ddpcore.comm import Communicator, choose_transport, connect
from ddpcore.comm.connect import TRANSPORTS, Connection
from ddpcore.comm.groups import default_group
from ddpcore.display.chart import Chart, Series
from ddpcore.display.table import number, table_of
from ddpcore.ops import Mixture
from ddpcore.options.fields import field
from ddpcore.parameters.flat import MiB
from ddpcore.runtime.launch import World
from ddpcore.runtime.machine import check_memory, free_memory
from ddpcore.runtime.progress import ProgressReport
from ddpcore.topology.base import Topology
from ddpcore.topology.pairs import RandomPair
from ddpcore.topology.regular import Ring
from ddpcore.training.memory import bytes_text
from ddpcore.training.sections import DEVICES

ALL = tuple(name for name in TRANSPORTS if name != "auto")
SMALLEST_BYTES = 32 * 2**10
FACTOR = 8  # from one size to the next
PATTERN = 251  # length of the pattern of values; a prime, so data at a wrong place have wrong values
PIECE = 2**20  # elements that are checked at a time
FEWEST, MOST = 5, 500  # repeats
BUFFERS = 5  # of one size that a transport holds at once, including received and internal ones


@dataclass(frozen=True, kw_only=True)
class CommConfig(Options):
    """Time averages and exchanges of many sizes over each transport, and check the received values."""

    EXAMPLE = "ddpcore bench comm --world-size 2"

    world_size: int | None = field(None, "number of ranks (4, or torchrun's)", least=1)
    transport: tuple[str, ...] | None = field(None, "comma-separated (those that run here)", choices=ALL)
    max_mib: float = field(256.0, "largest message, MiB", least=SMALLEST_BYTES / MiB)
    seconds: float = field(0.5, "about, for each operation, size and transport; at least five repeats", above=0)
    device: str = field("auto", choices=DEVICES)


def sizes(max_mib: float) -> list[int]:
    """Message sizes in bytes: each FACTOR times the one before, and the largest."""
    largest = int(max_mib * MiB) // 16 * 16
    steps = [SMALLEST_BYTES * FACTOR**power for power in range(64)]
    return [*(size for size in steps if size < largest), largest]


def prepare(config: CommConfig, torchrun: World | None) -> Callable[[], None]:
    """Check the config on this machine; return a function that starts the ranks."""
    num_ranks = config.world_size or (4 if torchrun is None else torchrun.world_size)
    device = resolve_device(config.device, torch.cuda.device_count())
    settings = f"run.device={device}", f"data.batch_size={num_ranks}"
    resolved = command.resolve_ranks(BenchConfig(settings=settings, world_size=config.world_size), torchrun)
    chosen, hosts = [], 1 if torchrun is None else torchrun.num_hosts
    for name in config.transport or [name for name in ALL if name != "mixed" or hosts > 1]:
        try:
            choose_transport(name, world_size=resolved.world_size, device=resolved.device, num_hosts=hosts)
            chosen.append(name)
        except ValueError:
            if config.transport is not None:
                raise
    per_mib = (resolved.world_size if resolved.device == "cpu" else 1) * len(chosen) * BUFFERS * MiB
    largest = max(1, int(min(free_memory(resolved.device) / per_mib, config.max_mib)))
    advice = f"take --max-mib {largest}, or name one --transport"
    check_memory(f"messages of {config.max_mib:g} MiB", config.max_mib * per_mib, resolved.device, advice)
    return command.start_ranks(run_rank, resolved, config, tuple(chosen))


class Lane:
    """One transport and the row that it sends. The values of rank r are a fixed pattern plus r."""

    def __init__(self, transport: str, numel: int, device: torch.device) -> None:
        self.transport, self.device = transport, device
        self.comm: Communicator = connect(default_group(None), device, Connection(transport=transport))
        self.rows = self.comm.allocate((1, numel), torch.float32, device)  # in memory that the transport prefers
        self.num_steps = 0


def pieces(row: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """The pieces of a row, each with its pattern. A row is checked piece by piece to save memory."""
    pattern = torch.arange(PATTERN, dtype=torch.float32, device=row.device).repeat(-(-PIECE // PATTERN) + 1)
    for begin in range(0, len(row), PIECE):
        piece = row[begin : begin + PIECE]
        yield piece, pattern[begin % PATTERN :][: len(piece)]


def num_wrong(row: Tensor, offset: float) -> int:
    """Number of elements that differ from the pattern plus ``offset`` by more than a float32 rounding error."""
    close = (torch.isclose(piece, values + offset, rtol=1e-5, atol=1e-5) for piece, values in pieces(row))
    return sum(len(of_piece) - int(of_piece.sum()) for of_piece in close)


@dataclass(frozen=True)
class Operation:
    """A measured operation."""

    name: str
    topology: Topology | None = None  # None for the average over all ranks
    mixes: bool = False  # whether the neighbours' rows are averaged or only received

    def call(self, lane: Lane) -> list[Tensor]:
        """Run the operation; returns its output rows."""
        if self.topology is None:
            lane.comm.average_(lane.rows, 0).wait()
            return [lane.rows[0]]
        average = lane.comm.exchange(lane.rows, self.topology, lane.num_steps).mixture()
        lane.num_steps += 1
        if not self.mixes:
            assert isinstance(average, Mixture), "a rank of one learner mixes one row"
            return list(average.peers)
        average.apply_(lane.rows)
        return [lane.rows[0]]

    def offsets(self, rank: int, world_size: int, step: int) -> list[float]:
        """The expected output rows, each minus the pattern."""
        if self.topology is None:
            return [(world_size - 1) / 2]
        round_ = self.topology.round(step, rank, world_size)
        if not self.mixes:
            return [float(source) for source in round_.sources]
        weighted = zip(round_.weights, round_.sources, strict=True)
        return [round_.self_weight * rank + sum(weight * source for weight, source in weighted)]

    def bus_factor(self, world_size: int) -> float:
        """Bytes that a rank sends over the size of its row: 2(n-1)/n as in nccl-tests, or the number of neighbours."""
        if self.topology is None:
            return 2 * (world_size - 1) / world_size
        rounds = [self.topology.round(0, rank, world_size) for rank in range(world_size)]
        return float(max(len(round_.destinations) for round_ in rounds))


OPERATIONS = (
    Operation("all-reduce"),
    Operation("exchange pair", RandomPair(seed=0)),
    Operation("exchange ring", Ring()),
    Operation("mix pair", RandomPair(seed=0), mixes=True),
    Operation("mix ring", Ring(), mixes=True),
)


def run_rank(world: World, resolved: ResolvedConfig, config: CommConfig, transports: tuple[str, ...]) -> None:
    """What every rank runs; rank 0 prints and writes the result. RuntimeError: on every rank, wrong values arrived."""
    gc.freeze()  # excludes the imported modules, so that each collection takes milliseconds
    notes: list[str] = []
    rows = []
    total = len(sizes(config.max_mib)) * len(OPERATIONS)
    with ProgressReport("measurements", total, shown=world.rank == 0) as progress:
        for num_bytes in sizes(config.max_mib):
            lanes = _lanes(transports, num_bytes // 4, torch.device(resolved.device), notes)
            for operation in OPERATIONS:
                rows += _measure(operation, lanes, config.seconds)
                progress.advance(1, operation.name)
            del lanes  # frees the buffers that a connection keeps for each size
            gc.collect()
    if world.rank == 0:
        where = command.environment(resolved)
        where = {**where, "transport": None, "transport_reason": None, "notes": where["notes"] + notes}
        command.publish({"environment": where, "world_size": resolved.world_size, "rows": rows}, KIND, config)
    wrong = sorted({f"{row['op']} over {row['transport']}" for row in rows if row["num_wrong"]})
    if wrong:
        raise RuntimeError(f"wrong values arrived: {', '.join(wrong)}")


def _lanes(transports: Sequence[str], numel: int, device: torch.device, notes: list[str]) -> list[Lane]:
    lanes = []
    for name in transports:
        try:
            lanes.append(Lane(name, numel, device))
        except ValueError as error:  # the same on every rank
            note = f"{name} is left out: {error}"
            notes += [] if note in notes else [note]
    return lanes


@torch.no_grad()
def _measure(operation: Operation, lanes: list[Lane], seconds: float) -> list[dict[str, Any]]:
    """One row for each lane; lanes take turns. Collective."""
    wrong, once = [], []
    for lane in lanes:
        rank, world_size = lane.comm.learners[0], lane.comm.num_learners
        for piece, values in pieces(lane.rows[0]):  # num_wrong() checks these values
            piece.copy_(values + rank)
        offsets = operation.offsets(rank, world_size, lane.num_steps)
        found = operation.call(lane)
        wrong.append(sum(num_wrong(row, offset) for row, offset in zip(found, offsets, strict=True)))
        del found
        once.append(_seconds(operation, lane))
    everyone = np.array(gather((wrong, once)))  # [ranks, 2, lanes]
    # All ranks must take the same number of repeats, so the time of the slowest rank decides.
    repeats = max(FEWEST, min(MOST, round(len(lanes) * seconds / max(everyone[:, 1].max(axis=0).sum(), 1e-9))))
    times = np.array(gather([[_seconds(operation, lane) for lane in lanes] for _ in range(repeats)])).max(axis=0)
    of_lanes = zip(lanes, times.T.tolist(), map(int, everyone[:, 0].sum(axis=0)), strict=True)
    return [row_of(operation, *of_lane) for of_lane in of_lanes]


def _seconds(operation: Operation, lane: Lane) -> float:
    """Seconds from a barrier until this rank has its result."""
    return time_calls([partial(operation.call, lane)], lane.device.type).seconds


def row_of(operation: Operation, lane: Lane, seconds: list[float], wrong: int) -> dict[str, Any]:
    """A row as in the JSON file; bandwidths are computed from the median time."""
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


def parts(result: dict[str, Any]) -> list[Table | str]:
    """What the terminal and the page show of a result, as in the JSON file."""
    operations = list(dict.fromkeys(row["op"] for row in result["rows"]))
    rows = sorted(result["rows"], key=lambda row: (operations.index(row["op"]), row["size_bytes"]))
    title = f"{result['world_size']} ranks, slowest rank's time"
    asked = ("transport", "size", "time us p50", "algbw GB/s", "busbw GB/s", "#wrong")
    table = table_of(_COLUMNS, rows, title=title, left=("op", "transport"), asked=asked, group="op")
    return [*command.environment_lines(result["environment"]), table]


_COLUMNS = {
    "op": lambda row: row["op"],
    "transport": lambda row: row["transport"],
    "size": lambda row: bytes_text(row["size_bytes"]),
    "count": number("count", "{:,}"),
    "type": lambda row: row["type"],
    "time us p50": lambda row: f"{row['time_us']['p50']:,.1f}",
    "p99": lambda row: f"{row['time_us']['p99']:,.1f}",
    "algbw GB/s": number("algbw_gb_per_s"),
    "busbw GB/s": number("busbw_gb_per_s"),
    "#wrong": number("num_wrong", "{}"),
}


def charts(result: dict[str, Any]) -> list[Chart]:
    """The charts of a result, as in the JSON file."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in result["rows"]:
        points = found.setdefault(row["op"], {}).setdefault(row["transport"], [])
        points.append((row["size_bytes"], row["busbw_gb_per_s"]))
    drawn, y_label = [], "bus bandwidth, GB/s"
    for op, lanes in found.items():
        lines = {transport: zip(*sorted(points), strict=True) for transport, points in lanes.items()}
        series = [Series(name=name, x=x, y=y, style="line+points") for name, (x, y) in lines.items()]
        drawn.append(Chart(title=f"Bandwidth: {op}", x_label="bytes", y_label=y_label, series=series, log_x=True))
    return drawn


KIND = command.Kind(command.has("op"), "Operations over transports", parts, charts, CommConfig, prepare)
