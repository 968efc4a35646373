"""``python -m ddpcore.bench buckets``: which size of gradient buckets is fastest for a model on this machine."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpcore import models
from ddpcore.bench import alone, command_line
from ddpcore.bench import contender as contenders
from ddpcore.bench.command_line import check_names, check_writable, flag, names, option, settings, write_json
from ddpcore.bench.config import BenchConfig, Plan
from ddpcore.bench.contender import DEFAULT_BUCKET_MB, Contender, compute_of, exposed_ms, run_block
from ddpcore.bench.environment import environment, free_memory
from ddpcore.bench.job import Job, settle_real
from ddpcore.bench.memory import PeakMemory
from ddpcore.bench.run import build_dataset
from ddpcore.data import Dataset
from ddpcore.flat import MiB
from ddpcore.launch import World
from ddpcore.metrics import quantiles
from ddpcore.report.buckets import print_buckets, size_name
from ddpcore.report.plot import check_plot, plot_buckets

STRATEGIES = ("ddp", "ssgd", "noisy_ssgd")  # those that average gradients
WARM_UP_STEPS = 3  # DDP rebuilds its buckets after its first step, ddpcore before the second
COPIES = 4  # of the parameters that a contender holds: weights, gradients, momentum, buckets or staging


def size_of(name: str) -> float:
    """A bucket size as it is named on the command line, in MiB; that of ``one`` bucket is infinite.

    Raises:
        ValueError: it names none.
    """
    try:
        size = math.inf if name == "one" else float(name)
    except ValueError:
        size = math.nan
    if not size > 0 or (math.isinf(size) and name != "one"):
        raise ValueError(f"--bucket-mb: {name!r} is no size above 0 in MiB: for example 1,25,one")
    return size


@dataclass(frozen=True, kw_only=True)
class BucketsConfig:
    """A sweep of bucket sizes. Constructing one checks all that can be known before.

    Raises:
        ValueError: one line that says what is wrong and what to do.
    """

    world_size: int | None = option(None, "number of ranks (4, or torchrun's)", type=int)
    model: str = option("resnet18", ", ".join(models.names()))
    model_options: dict[str, Any] | None = option(
        None, "options of the model, such as hidden=2048x2048 of mlp", type=settings, metavar="KEY=VALUE,..."
    )
    strategies: tuple[str, ...] = option(
        ("ddp", "ssgd"), f"comma-separated, of {','.join(STRATEGIES)}", metavar="A,B,...", type=names
    )
    bucket_mb: tuple[str, ...] = option(
        ("0.25", "1", "5", "10", "25", "50", "100", "one"),
        "largest bucket in MiB, or 'one' for all in one; 25 always takes part",
        metavar="A,B,...",
        type=names,
    )
    batch_size: int = option(32, "global, over all ranks", type=int)
    rounds: int = option(11, "turns of every bucket size", type=int)
    steps: int = option(1, "steps of a turn", type=int)
    seed: int = option(0, "of weights and batches", type=int)
    device: str = option("auto", "auto, cpu, cuda")
    transport: str = option("auto", "of all but ddp: auto, shm, ipc, pg")
    json: Path | None = option(None, "write the result to this file", type=Path, metavar="FILE")
    plot: Path | None = option(None, "draw it into this PNG or SVG file", type=Path, metavar="FILE")

    def __post_init__(self) -> None:
        check_names("strategies", self.strategies, STRATEGIES, "strategy with buckets")
        for name in ("rounds", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} is {getattr(self, name)}: it must be at least 1")
        if len({size_of(name) for name in self.bucket_mb}) != len(self.bucket_mb):
            raise ValueError("--bucket-mb names one twice: name each once")
        self.bench()
        if self.plot is not None:
            check_plot(self.plot)
            check_writable(self.plot.resolve(), "plot")

    def bench(self) -> BenchConfig:
        """The same run as a training bench has it.

        Raises:
            ValueError: there is none.
        """
        shared = ("world_size", "model", "model_options", "strategies", "batch_size", "seed", "device", "transport")
        return BenchConfig(**{name: getattr(self, name) for name in (*shared, "json")})

    def all_sizes(self) -> list[float]:
        """Those asked for and the default, ascending."""
        return sorted({*map(size_of, self.bucket_mb), DEFAULT_BUCKET_MB})


@dataclass
class Swept:
    """A strategy with one bucket size.

    Attributes:
        also: larger sizes that build the same buckets.
        comm_seconds: of the averages alone, a list a round.
    """

    contender: Contender
    bucket_mb: float
    peak_memory_mb: float | None
    also: list[float] = field(default_factory=list)
    comm_seconds: list[float] = field(default_factory=list)


def prepare(argv: Sequence[str], joined: World | None) -> Job:
    """What the command line says, checked before any process starts.

    Raises:
        ValueError: it cannot be run as it stands; one line.
    """
    config = command_line.parse(
        BucketsConfig,
        argv,
        prog="python -m ddpcore.bench buckets",
        description="Train a model with buckets of several sizes in turn, and name the fastest.",
    )
    plan = settle_real(config.bench(), joined)
    build_dataset(plan, first=True)
    advice = "name fewer sizes with --bucket-mb, or a smaller --model"
    check_memory(_num_contenders(config), plan, advice)
    return Job(worker=run_rank, args=(plan, config), world_size=plan.world_size, backend=plan.choice.backend)


def run_rank(world: World, plan: Plan, config: BucketsConfig) -> None:
    """The worker of :func:`ddpcore.launch.run`; rank 0 prints and writes."""
    dataset = build_dataset(plan, first=False).to(plan.device)
    computes = {compute_of(name): contenders.build(compute_of(name), plan, world, dataset) for name in plan.strategies}
    for compute in computes.values():
        run_block(compute, WARM_UP_STEPS, False)
    field = [swept for name in plan.strategies for swept in _sweep(name, config, plan, world, dataset)]
    calls = [alone.averages(swept.contender) for swept in field]
    for _ in range(config.rounds):
        for compute in computes.values():
            run_block(compute, config.steps, True)
        for swept, averages in zip(field, calls, strict=True):
            run_block(swept.contender, config.steps, True)
            swept.comm_seconds.append(sum(alone.time_calls(averages, plan.device)[0]))
    seen = [_gather(swept) for swept in field]
    if world.rank == 0:
        seconds = {name: computes[compute_of(name)].block_seconds for name in plan.strategies}
        rows = [row_of(one, seconds[one["strategy"]], config.steps) for one in seen]
        _finish(config, plan, rows, [recommend(name, seen) for name in plan.strategies])


def _sweep(name: str, config: BucketsConfig, plan: Plan, world: World, dataset: Dataset) -> list[Swept]:
    """The strategy once for each set of buckets that differs from the others; contenders that do not go at once."""
    found: dict[tuple[int, ...], Swept] = {}
    for size in config.all_sizes():
        memory = PeakMemory(plan.device, world.local_world_size)
        contender = contenders.build(name, plan, world, dataset, size)
        run_block(contender, WARM_UP_STEPS, False)
        built = tuple(alone.bucket_bytes(contender))
        if built in found:
            found[built].also.append(size)
        else:
            found[built] = Swept(contender, size, memory.grown_mb())
        del contender
        gc.collect()
    return list(found.values())


def _step_ms(contender: Contender) -> dict[str, float]:
    everyone = alone.gather(contender.step_seconds)
    return quantiles(1e3 * second for seconds in everyone for second in seconds)


def _gather(swept: Swept) -> dict[str, Any]:
    """What all ranks saw of a size. Collective."""
    everyone = alone.gather((swept.comm_seconds, swept.peak_memory_mb))
    peaks = [peak for _, peak in everyone if peak is not None]
    slowest = [max(of_round) for of_round in zip(*(seconds for seconds, _ in everyone), strict=True)]
    return {
        "strategy": swept.contender.name,
        "bucket_mb": swept.bucket_mb,
        "also": swept.also,
        "bucket_bytes": alone.bucket_bytes(swept.contender),
        "sent_bytes": alone.sent_bytes(swept.contender),
        "step_ms": _step_ms(swept.contender),
        "comm_ms": 1e3 * quantiles(slowest)["p50"],
        "round_seconds": swept.contender.block_seconds,
        "peak_memory_mb": max(peaks) if peaks else None,
    }


def row_of(seen: dict[str, Any], compute_seconds: Sequence[float], steps: int) -> dict[str, Any]:
    """What the JSON file holds of a size."""
    exposed = exposed_ms(seen["round_seconds"], compute_seconds, [steps] * len(compute_seconds))
    return {
        "strategy": seen["strategy"],
        "bucket_mb": seen["bucket_mb"],
        "same_buckets_mb": seen["also"],
        "num_buckets": len(seen["bucket_bytes"]),
        "bucket_bytes": seen["bucket_bytes"],
        "num_sent": len(seen["sent_bytes"]),
        "sent_bytes": seen["sent_bytes"],
        "step_ms": seen["step_ms"],
        "comm_ms": seen["comm_ms"],
        "exposed_comm_ms": exposed,
        "overlap_pct": overlap_pct(seen["comm_ms"], exposed),
        "peak_memory_mb": seen["peak_memory_mb"],
    }


def overlap_pct(comm_ms: float, exposed_ms: float) -> float:
    """Share of the communication, as it lasts alone, that the step does not show: from 0 to 100."""
    return 100 * min(1.0, max(0.0, 1 - exposed_ms / comm_ms)) if comm_ms > 0 else 100.0


def recommend(strategy: str, seen: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The bucket size for a strategy: the fastest, or the default where the difference may be noise.

    Sizes took turns, so the time of a turn is compared with that of the default in the same round. The margin is the
    median of these differences, the noise their spread from the 20th to the 80th percentile, both relative to the
    default's median. A margin counts where it is larger than the noise.
    """
    ours = [one for one in seen if one["strategy"] == strategy]
    default = next(one for one in ours if DEFAULT_BUCKET_MB in (one["bucket_mb"], *one["also"]))
    fastest = min(ours, key=lambda one: quantiles(one["round_seconds"])["p50"])
    typical = quantiles(default["round_seconds"])["p50"]
    pairs = zip(default["round_seconds"], fastest["round_seconds"], strict=True)
    gains = quantiles(100 * (slow - fast) / typical for slow, fast in pairs)
    noise = gains["p80"] - gains["p20"]
    counts = gains["p50"] > noise
    return {
        "strategy": strategy,
        "bucket_mb": fastest["bucket_mb"] if counts else DEFAULT_BUCKET_MB,
        "fastest_mb": DEFAULT_BUCKET_MB if fastest is default else fastest["bucket_mb"],
        "default_mb": DEFAULT_BUCKET_MB,
        "margin_pct": gains["p50"],
        "noise_pct": noise,
        "beyond_noise": counts,
        "rounds": len(default["round_seconds"]),
    }


def _finish(config: BucketsConfig, plan: Plan, rows: list[dict[str, Any]], recommended: list[dict[str, Any]]) -> None:
    notes = [
        f"{row['strategy']}: {', '.join(map(size_name, row['same_buckets_mb']))} would build the buckets of "
        f"{size_name(row['bucket_mb'])} again and take no part"
        for row in rows
        if row["same_buckets_mb"]
    ]
    where = environment(plan)
    result = {
        "environment": {**where, "notes": where["notes"] + notes},
        "model": config.model,
        "world_size": plan.world_size,
        "batch_size": config.batch_size,
        "rounds": config.rounds,
        "rows": rows,
        "recommended": recommended,
    }
    if config.json is not None:
        write_json(config.json, result)
    if config.plot is not None:
        plot_buckets(result, config.plot)
    print_buckets(result)


def check_memory(num_contenders: int, plan: Plan, advice: str) -> None:
    """A machine that runs out of memory kills ranks without a word.

    Raises:
        ValueError: so many contenders, each with a model of its own, do not fit; the message ends in ``advice``.
    """
    num_bytes = _num_bytes(plan.config)
    ranks = plan.world_size if plan.device == "cpu" else 1
    needed, free = ranks * COPIES * num_bytes * num_contenders, free_memory(plan.device)
    if needed > free:
        raise ValueError(
            f"{num_contenders} copies of {plan.config.model} need about {needed / 1e9:.1f} GB of memory and "
            f"{free / 1e9:.1f} GB are free: {advice}"
        )


def _num_contenders(config: BucketsConfig) -> int:
    """At most, with those that only compute: sizes beyond the model are one."""
    model_mb = _num_bytes(config.bench()) / MiB
    sizes = {min(size, model_mb) for size in config.all_sizes()}
    return len(set(map(compute_of, config.strategies))) + len(config.strategies) * (1 + len(sizes))


def _num_bytes(config: BenchConfig) -> int:
    """Of the model's parameters."""
    model = models.build(config.model, **(config.model_options or {}))
    return sum(4 * parameter.numel() for parameter in model.parameters())
