"""``python -m ddpcore.bench stats``: the time that noise statistics add to a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ddpcore.bench.command import publish
from ddpcore.bench.config import Options, resolve_device
from ddpcore.bench.result import Kind, bars, has
from ddpcore.diagnostics import NoiseStatistics
from ddpcore.display.chart import Chart
from ddpcore.display.table import interval, table_of
from ddpcore.distributed.distribute import distribute
from ddpcore.models import MODELS
from ddpcore.optim import FusedSGD
from ddpcore.options.fields import field
from ddpcore.runtime import launch
from ddpcore.runtime.launch import World
from ddpcore.runtime.machine import machine
from ddpcore.runtime.progress import ProgressReport
from ddpcore.runtime.timing import quantiles
from ddpcore.strategies.base import Baseline, Strategy
from ddpcore.strategies.registry import STRATEGIES, is_baseline
from ddpcore.topology.registry import TOPOLOGIES
from ddpcore.training.trainer import learner_losses

WARM_UP = 5  # steps of each contender


@dataclass(frozen=True, kw_only=True)
class StatsConfig(Options):
    """Time steps without statistics, with those that cost nothing extra, and with all, interleaved."""

    EXAMPLE = "python -m ddpcore.bench stats --world-size 4 --every 50"

    world_size: int = field(2, "ranks, or virtual learners")
    backend: str = field("gloo", choices=("gloo", "virtual"))
    strategy: str = field("ssgd", parts=STRATEGIES)
    device: str = field("cpu", "cuda needs virtual learners", choices=("cpu", "cuda"))
    model: str = field("lenet5", parts=MODELS)
    batch_size: int = field(256, "samples of a learner's batch", least=1)
    every: int = field(50, "steps between two records", least=1)
    blocks: int = field(10, "blocks of --every steps of each contender, in turn", least=1)
    threads: int = field(1, "of each rank", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.world_size < 2:
            raise ValueError(f"--world-size is {self.world_size}: the estimate needs two batches, take at least 2")
        if self.device == "cuda" and self.backend != "virtual":
            raise ValueError("--device cuda is for learners that share a GPU: use --backend virtual")
        resolve_device(self.device, torch.cuda.device_count())
        if is_baseline(self.strategy) or self.make_strategy().traits.no_mean:
            raise ValueError(f"--strategy: {self.strategy} trains no mean that statistics could follow: take ssgd")

    def make_strategy(self) -> Strategy | Baseline:
        """A strategy, on a ring if it has neighbours. Raises ValueError if it needs options."""
        return STRATEGIES.build(self.strategy, topology=TOPOLOGIES.build("ring"))


def prepare(config: StatsConfig, torchrun: World | None) -> Callable[[], None]:
    """A function that starts the ranks; the config needs no further check."""
    return lambda: launch.run(run_rank, (config,), world_size=config.world_size, backend=config.backend)


class Contender:
    """One training loop, with the statistics that ``watch`` attaches to it."""

    def __init__(self, name: str, config: StatsConfig, watch: Watch) -> None:
        self.name, self.config = name, config
        virtual = config.backend == "virtual"
        torch.manual_seed(0)
        model = MODELS.build(config.model).to(config.device)
        self.optimizer = FusedSGD(model.parameters(), lr=0.01, momentum=0.9)
        learners = config.world_size if virtual else None
        self.handle = distribute(model, self.optimizer, config.make_strategy(), learners=learners)
        rows = (config.world_size,) if virtual else ()
        batch = MODELS.spec(config.model).random_batch(*rows, config.batch_size)
        self.inputs, self.labels = (tensor.to(config.device) for tensor in batch)
        self.stacked = virtual
        self.seconds: list[float] = []
        self.statistics = watch(self)

    def loss(self) -> Tensor:
        """Sum over the learners of this process."""
        return learner_losses(self.handle.model(self.inputs), self.labels, stacked=self.stacked).sum()

    def run_block(self, num_steps: int, timed: bool) -> None:
        """Train; keep the mean seconds of a step if ``timed``."""
        start = time.perf_counter()
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()
        if self.config.device == "cuda":
            torch.cuda.synchronize()
        if timed:
            self.seconds.append((time.perf_counter() - start) / num_steps)


def _statistics(one: Contender, **losses: Any) -> NoiseStatistics:
    return NoiseStatistics(one.handle, one.optimizer, one.config.every, batch_size=one.config.batch_size, **losses)


Watch = Callable[[Contender], NoiseStatistics | None]
WATCHES: dict[str, Watch] = {
    "off": lambda one: None,
    "off again": lambda one: None,  # how much two equal loops differ on this machine
    "free": _statistics,
    "all": lambda one: _statistics(one, loss=one.loss, full_loss=one.loss),
}


def run_rank(world: World, config: StatsConfig) -> None:
    """What every rank runs: all contenders in turn, block by block; rank 0 prints and writes the result."""
    torch.set_num_threads(config.threads)
    contenders = [Contender(name, config, watch) for name, watch in WATCHES.items()]
    for one in contenders:
        one.run_block(WARM_UP, timed=False)
    with ProgressReport("blocks", config.blocks * len(contenders), shown=world.rank == 0) as progress:
        for block in range(config.blocks):
            for one in contenders if block % 2 == 0 else reversed(contenders):
                one.run_block(config.every, timed=True)
                progress.advance(1, one.name)
    if world.rank == 0:
        rows = [_row(one, contenders[0]) for one in contenders]
        result = {"environment": machine(config.device), "config": config, "rows": rows}
        publish(result, KIND, config)


def _row(one: Contender, off: Contender) -> dict[str, Any]:
    records = [] if one.statistics is None else one.statistics.records
    return {
        "statistics": one.name,
        "step_ms": quantiles([1e3 * seconds for seconds in one.seconds]),
        "overhead_pct": quantiles([100 * (a / b - 1) for a, b in zip(one.seconds, off.seconds, strict=True)]),
        "measuring_pct": quantiles([100 * record.share for record in records]) if records else None,
        "num_records": len(records),
    }


def parts(result: dict[str, Any]) -> list[Table | str]:
    """What the terminal and the page show of a result, as in the JSON file."""
    config = result["config"]
    what = f"{config['model']}, {config['strategy']}, {config['world_size']} learners ({config['backend']})"
    title = f"{what}, batch {config['batch_size']} each, a record every {config['every']} steps"
    caption = (
        "medians over interleaved blocks, p20 to p80 in brackets; overhead: relative to the block of 'off' in the same "
        "round"
    )
    return [table_of(_COLUMNS, result["rows"], title=title, left=("statistics",), caption=caption)]


def _percent(quantiles: dict[str, float]) -> str:
    return f"{quantiles['p50']:+.1f} % [{quantiles['p20']:+.1f}, {quantiles['p80']:+.1f}]"


_COLUMNS = {
    "statistics": lambda row: row["statistics"],
    "ms a step": lambda row: interval(row["step_ms"]),
    "overhead": lambda row: _percent(row["overhead_pct"]),
    "measuring": lambda row: "-" if row["measuring_pct"] is None else f"{row['measuring_pct']['p50']:.2f} %",
    "records": lambda row: str(row["num_records"]),
}


def charts(result: dict[str, Any]) -> list[Chart]:
    """The charts of a result, as in the JSON file."""
    rows = result["rows"]
    return [bars("Overhead of statistics", "%", [row["statistics"] for row in rows], [r["overhead_pct"] for r in rows])]


KIND = Kind(has("statistics"), "Cost of statistics", parts, charts)
