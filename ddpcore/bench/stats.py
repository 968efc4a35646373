"""``ddpcore bench stats``: the time that noise statistics add to a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ddpcore.bench.command import Kind, bars, environment, has, publish, resolve_here, start_ranks
from ddpcore.bench.config import DEFAULTS, BenchConfig, ResolvedConfig
from ddpcore.bench.contender import WARM_UP_STEPS, Contender, build_contender, build_dataset, run_block
from ddpcore.diagnostics import NoiseStatistics
from ddpcore.display.chart import Chart
from ddpcore.display.table import interval, table_of
from ddpcore.options.fields import field
from ddpcore.runtime.launch import World
from ddpcore.runtime.progress import ProgressReport
from ddpcore.runtime.timing import quantiles
from ddpcore.strategies.registry import STRATEGIES, is_baseline
from ddpcore.training.build import threads_for

LENET = {**DEFAULTS, "model": {"name": "lenet5"}, "data": {"batch_size": 1024}, "strategy": {"topology": "ring"}}
# "off again" shows how much two equal loops differ on this machine.
WATCHED = ("off", "off again", "free", "all")


@dataclass(frozen=True, kw_only=True)
class StatsConfig(BenchConfig):
    """Time steps without statistics, with those that cost nothing extra, and with all, interleaved."""

    DEFAULTS = LENET
    EXAMPLE = "ddpcore bench stats --world-size 4 --every 50"

    strategies: tuple[str, ...] = field(("ssgd",), "one of them", parts=STRATEGIES)
    every: int = field(50, "steps between two records", least=1)
    blocks: int = field(10, "blocks of --every steps of each contender, in turn", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        name, *others = self.strategies
        if others:
            raise ValueError(f"--strategies has {len(self.strategies)} names: give one")
        if is_baseline(name) or self.strategy(name).traits.no_mean:
            raise ValueError(f"--strategies: {name} trains no mean that statistics could follow: take ssgd")


def prepare(config: StatsConfig, torchrun: World | None) -> Callable[[], None]:
    """Check the config on this machine; return a function that starts the ranks."""
    resolved = resolve_here(config, torchrun)
    if resolved.world_size < 2:
        raise ValueError(f"--world-size is {resolved.world_size}: the estimate needs two batches, take at least 2")
    build_dataset(resolved, first=True)
    return start_ranks(run_rank, resolved, config)


def run_rank(world: World, resolved: ResolvedConfig, config: StatsConfig) -> None:
    """What every rank runs: all contenders in turn, block by block; rank 0 prints and writes the result."""
    dataset = build_dataset(resolved, first=False).to(resolved.device)
    (strategy,), num_ranks = config.strategies, 1 if resolved.is_virtual else resolved.world_size
    training = resolved.train_config(strategy)
    with threads_for(training, dataset, num_ranks):
        contenders = {name: build_contender(strategy, resolved, world, dataset) for name in WATCHED}
        statistics = {name: _watch(name, one, config.every) for name, one in contenders.items()}
        for one in contenders.values():
            run_block(one, WARM_UP_STEPS, False)
        with ProgressReport("blocks", config.blocks * len(WATCHED), shown=world.rank == 0) as progress:
            for block in range(config.blocks):
                for name in WATCHED if block % 2 == 0 else reversed(WATCHED):
                    run_block(contenders[name], config.every, True)
                    progress.advance(1, name)
        if world.rank == 0:
            seconds = {name: [total / config.every for total in one.block_seconds] for name, one in contenders.items()}
            about = {
                "world_size": resolved.world_size,
                "backend": resolved.choice.backend,
                "strategy": strategy,
                "device": resolved.device,
                "model": training.model.name,
                "batch_size": training.data.batch_size // resolved.world_size,
                "every": config.every,
                "blocks": config.blocks,
            }
            rows = [_row(name, statistics[name], seconds[name], seconds[WATCHED[0]]) for name in WATCHED]
            publish({"environment": environment(resolved), "config": about, "rows": rows}, KIND, config)


def _watch(name: str, one: Contender, every: int) -> NoiseStatistics | None:
    """The statistics of a contender: none, those without extra passes, or all."""
    trainer = one.trainer
    if trainer is None or name.startswith("off"):
        return None

    def loss() -> Any:
        """Sum over the learners of this process."""
        return trainer.losses(trainer.handle.model, trainer.indices()).sum()

    size = trainer.batches.batch_size // trainer.batches.num_learners
    losses: dict[str, Any] = {"loss": loss, "full_loss": loss} if name == "all" else {}
    return NoiseStatistics(trainer.handle, trainer.optimizer, every, batch_size=size, **losses)


def _row(
    name: str, statistics: NoiseStatistics | None, seconds: Sequence[float], off: Sequence[float]
) -> dict[str, Any]:
    records = [] if statistics is None else statistics.records
    return {
        "statistics": name,
        "step_ms": quantiles([1e3 * one for one in seconds]),
        "overhead_pct": quantiles([100 * (a / b - 1) for a, b in zip(seconds, off, strict=True)]),
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
