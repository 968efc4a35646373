"""``python -m ddpcore.bench stats``: what noise statistics add to the time of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpcore import launch, models, parallel, strategies, topology
from ddpcore.bench import command_line
from ddpcore.bench.command_line import check_choice, check_writable, flag, option, write_json
from ddpcore.bench.environment import machine
from ddpcore.diagnostics import NoiseStatistics
from ddpcore.engine.trainer import learner_losses
from ddpcore.launch import World
from ddpcore.metrics import quantiles, to_json
from ddpcore.optim import FusedSGD
from ddpcore.report.stats import print_stats

STRATEGIES = ("ssgd", "dpsgd", "local_sgd")
WARM_UP = 5  # steps of each contender


@dataclass(frozen=True, kw_only=True)
class StatsConfig:
    """A run of the statistics bench. Constructing one checks all that can be known before.

    Raises:
        ValueError: one line that says what is wrong and what to do.
    """

    world_size: int = option(2, "ranks, or virtual learners", type=int)
    backend: str = option("gloo", "gloo, or virtual")
    strategy: str = option("ssgd", ", ".join(STRATEGIES))
    device: str = option("cpu", "cpu, or cuda of virtual learners")
    model: str = option("lenet5", ", ".join(models.names()))
    batch_size: int = option(256, "samples of a learner's batch", type=int)
    every: int = option(50, "steps between two records", type=int)
    blocks: int = option(10, "blocks of --every steps of each contender, in turn", type=int)
    threads: int = option(1, "of each rank", type=int)
    json: Path | None = option(None, "write the result to this file", type=Path, metavar="FILE")

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, ("gloo", "virtual"))
        check_choice("device", self.device, ("cpu", "cuda"))
        check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("model", self.model, models.names())
        for name in ("batch_size", "every", "blocks", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} is {getattr(self, name)}: it must be at least 1")
        if self.world_size < 2:
            raise ValueError(f"--world-size is {self.world_size}: the estimate needs two batches, take at least 2")
        if self.device == "cuda" and self.backend != "virtual":
            raise ValueError("--device cuda is for learners that share a GPU: use --backend virtual")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"--device cuda: torch {torch.__version__} sees no GPU: use --device cpu")
        if self.json is not None:
            check_writable(self.json.resolve())


def main(argv: Sequence[str]) -> int:
    """Run the bench; returns 0, or 1 where a rank failed.

    Raises:
        ValueError: the command cannot be run as it stands; one line.
    """
    config = command_line.parse(
        StatsConfig,
        argv,
        prog="python -m ddpcore.bench stats",
        description="Seconds a step without statistics, with those that are free, and with all, interleaved.",
    )
    try:
        launch.run(run_rank, (config,), world_size=config.world_size, backend=config.backend)
    except launch.RankFailed as error:
        print(f"ddpcore.bench stats: {error}")
        return 1
    return 0


class Contender:
    """One training loop; ``watch`` adds statistics to it."""

    def __init__(self, name: str, config: StatsConfig, watch: Callable[[Contender], NoiseStatistics | None]) -> None:
        self.name, self.config = name, config
        self.virtual = config.backend == "virtual"
        torch.manual_seed(0)
        model = models.build(config.model).to(config.device)
        self.optimizer = FusedSGD(model.parameters(), lr=0.01, momentum=0.9)
        strategy = strategies.build(config.strategy, topology=topology.build("ring", 0, 2))
        learners = config.world_size if self.virtual else None
        self.handle = parallel.distribute(model, self.optimizer, strategy, learners=learners)
        spec = models.spec(config.model)
        shape = (config.batch_size, *spec.input_shapes[0])
        rows = (config.world_size,) if self.virtual else ()
        self.inputs = torch.randn(*rows, *shape).to(config.device)
        self.labels = torch.randint(spec.num_classes, (*rows, config.batch_size)).to(config.device)
        self.seconds: list[float] = []
        self.statistics = watch(self)

    def loss(self) -> Tensor:
        """Sum over the learners held here."""
        return learner_losses(self.handle.model(self.inputs), self.labels).sum()

    def run_block(self, num_steps: int, timed: bool) -> None:
        """Train; keep the mean seconds of a step."""
        start = time.perf_counter()
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()
        if self.config.device == "cuda":
            torch.cuda.synchronize()
        if timed:
            self.seconds.append((time.perf_counter() - start) / num_steps)


def _watch_free(one: Contender) -> NoiseStatistics:
    return NoiseStatistics(one.handle, one.optimizer, one.config.every, batch_size=one.config.batch_size)


def _watch_all(one: Contender) -> NoiseStatistics:
    return NoiseStatistics(
        one.handle,
        one.optimizer,
        one.config.every,
        batch_size=one.config.batch_size,
        loss=one.loss,
        full_loss=one.loss,
    )


WATCHES: dict[str, Callable[[Contender], NoiseStatistics | None]] = {
    "off": lambda one: None,
    "off again": lambda one: None,  # what the difference of two equal loops looks like here
    "free": _watch_free,
    "all": _watch_all,
}


def run_rank(world: World, config: StatsConfig) -> None:
    """The worker: all contenders in turn, block by block; rank 0 prints."""
    torch.set_num_threads(config.threads)
    field = [Contender(name, config, watch) for name, watch in WATCHES.items()]
    for one in field:
        one.run_block(WARM_UP, timed=False)
    for block in range(config.blocks):
        for one in field if block % 2 == 0 else reversed(field):
            one.run_block(config.every, timed=True)
    if world.rank == 0:
        result = {
            "environment": machine(config.device),
            "config": config,
            "rows": [_row(one, field[0]) for one in field],
        }
        print_stats(to_json(result))
        if config.json is not None:
            write_json(config.json, to_json(result))


def _row(one: Contender, off: Contender) -> dict[str, Any]:
    records = [] if one.statistics is None else one.statistics.records
    return {
        "statistics": one.name,
        "step_ms": quantiles([1e3 * seconds for seconds in one.seconds]),
        "overhead_pct": quantiles([100 * (a / b - 1) for a, b in zip(one.seconds, off.seconds, strict=True)]),
        "measuring_pct": quantiles([100 * record.share for record in records]) if records else None,
        "num_records": len(records),
    }
