"""``ddpcore bench buckets``: the size of gradient buckets that is fastest for a model on this machine."""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ddpcore.bench import command, contender
from ddpcore.bench.command import size_name
from ddpcore.bench.config import LARGE, BenchConfig, ResolvedConfig
from ddpcore.bench.contender import DEFAULT_BUCKET_MB, Contender, compute_of
from ddpcore.bench.isolated import averages, bucket_bytes, message_bytes, time_calls
from ddpcore.data import Dataset
from ddpcore.display.chart import Chart, Series
from ddpcore.display.table import number, spread, table_of
from ddpcore.options.fields import field
from ddpcore.parameters.flat import MiB
from ddpcore.runtime.launch import World
from ddpcore.runtime.progress import ProgressReport
from ddpcore.runtime.timing import quantiles
from ddpcore.strategies.registry import STRATEGIES, is_baseline


@dataclass(frozen=True, kw_only=True)
class BucketsConfig(BenchConfig):
    """Train a model with buckets of several sizes in turn, and name the fastest."""

    DEFAULTS = LARGE
    EXAMPLE = "ddpcore bench buckets --world-size 2 model=resnet18"

    strategies: tuple[str, ...] = field(("ddp", "ssgd"), "that average gradients, comma-separated", parts=STRATEGIES)
    bucket_mb: tuple[str, ...] = field(
        ("0.25", "1", "5", "10", "25", "50", "100", "one"),
        "largest bucket in MiB, or 'one' for one bucket; 25 is always measured",
    )
    rounds: int = field(11, "turns of every bucket size", least=1)
    steps: int = field(1, "steps in each turn", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        contender.parse_sizes(self.bucket_mb)
        for name in self.strategies:
            if not self.strategy(name).traits.averages_gradients:
                raise ValueError(f"--strategies: {name} averages no gradients, so it has no buckets: leave it out")
            if is_baseline(name) and not STRATEGIES.takes(name, "bucket_cap_mb"):
                raise ValueError(f"--strategies: {name} has no option bucket_cap_mb: leave it out")

    def all_sizes(self) -> list[float]:
        """The sizes of the command line and the default, in MiB, ascending."""
        return sorted({*contender.parse_sizes(self.bucket_mb), DEFAULT_BUCKET_MB})


@dataclass
class Candidate:
    """A strategy with one bucket size."""

    trains: Contender
    bucket_mb: float
    same_mb: list[float] = field(list)  # larger sizes that build the same buckets
    comm_seconds: list[float] = field(list)  # of the averages in isolation, one sum for each round

    def gather(self) -> dict[str, Any]:
        """The measurements of all ranks. Collective."""
        comm, steps = zip(*contender.gather((self.comm_seconds, self.trains.step_seconds)), strict=True)
        built, sent = bucket_bytes(self.trains), message_bytes(self.trains)
        return {
            "strategy": self.trains.name,
            "bucket_mb": self.bucket_mb,
            "same_buckets_mb": self.same_mb,
            "num_buckets": len(built),
            "bucket_bytes": built,
            "num_sent": len(sent),
            "sent_bytes": sent,
            "step_ms": quantiles(1e3 * second for seconds in steps for second in seconds),
            "comm_ms": 1e3 * quantiles(max(of_round) for of_round in zip(*comm, strict=True))["p50"],
            "round_seconds": self.trains.block_seconds,
        }


def prepare(config: BucketsConfig, torchrun: World | None) -> Callable[[], None]:
    """Check the config on this machine; return a function that starts the ranks."""
    resolved = command.resolve_ranks(config, torchrun)
    contender.build_dataset(resolved, first=True)
    model = resolved.training.model
    # At most: sizes beyond the model build the same buckets.
    num_sizes = len({min(size, command.model_bytes(model.name, **model.options) / MiB) for size in config.all_sizes()})
    num_models = len(set(map(compute_of, config.strategies))) + len(config.strategies) * (1 + num_sizes)
    command.check_models_memory(num_models, resolved, "name fewer sizes with --bucket-mb, or a smaller --model")
    return command.start_ranks(run_rank, resolved, config)


def run_rank(world: World, resolved: ResolvedConfig, config: BucketsConfig) -> None:
    """What every rank runs; rank 0 prints and writes the result."""
    gc.freeze()  # excludes the imported modules, so that each collection takes milliseconds
    dataset = contender.build_dataset(resolved, first=False).to(resolved.device)
    names = dict.fromkeys(map(compute_of, resolved.strategies))
    computes = {name: Contender.build(name, resolved, world, dataset) for name in names}
    num_models = len(computes) + len(resolved.strategies) * len(config.all_sizes())
    with ProgressReport("warm-ups", num_models, shown=world.rank == 0) as progress:
        for name, compute in computes.items():
            compute.warm_up()
            progress.advance(1, name)
        candidates = [
            one for name in resolved.strategies for one in _candidates(name, config, resolved, world, dataset, progress)
        ]
    calls = [averages(one.trains) for one in candidates]
    with ProgressReport("measurements", config.rounds * len(candidates), shown=world.rank == 0) as progress:
        for _ in range(config.rounds):
            for compute in computes.values():
                compute.run(config.steps, timed=True)
            for one, of_one in zip(candidates, calls, strict=True):
                one.trains.run(config.steps, timed=True)
                one.comm_seconds.append(time_calls(of_one, resolved.device).seconds)
                progress.advance(1, one.trains.name)
    measured = [one.gather() for one in candidates]
    if world.rank == 0:
        seconds = {name: computes[compute_of(name)].block_seconds for name in resolved.strategies}
        rows = [row_of(one, seconds[one["strategy"]], config.steps) for one in measured]
        where = command.environment(resolved)
        for row in [row for row in rows if row["same_buckets_mb"]]:
            alike = f"{', '.join(map(size_name, row['same_buckets_mb']))} would build the same buckets as"
            where["notes"].append(f"{row['strategy']}: {alike} {size_name(row['bucket_mb'])} and are not measured")
        result = {
            "environment": where,
            "model": resolved.training.model.name,
            "world_size": resolved.world_size,
            "batch_size": resolved.training.data.batch_size,
            "rounds": config.rounds,
            "rows": rows,
            "recommended": [recommend(name, measured) for name in resolved.strategies],
        }
        command.publish(result, KIND, config)


def _candidates(
    name: str, config: BucketsConfig, resolved: ResolvedConfig, world: World, dataset: Dataset, progress: ProgressReport
) -> list[Candidate]:
    """One candidate for each different set of buckets. A contender whose buckets exist already is freed at once."""
    found: dict[tuple[int, ...], Candidate] = {}
    for size in config.all_sizes():
        one = Contender.build(name, resolved, world, dataset, size)
        one.warm_up()
        progress.advance(1, name)
        built = tuple(bucket_bytes(one))
        if built in found:
            found[built].same_mb.append(size)
        else:
            found[built] = Candidate(one, size)
        del one
        gc.collect()
    return list(found.values())


def row_of(measured: dict[str, Any], compute_seconds: Sequence[float], steps: int) -> dict[str, Any]:
    """The row of a candidate, as in the JSON file."""
    exposed = contender.exposed_ms(measured["round_seconds"], compute_seconds, [steps] * len(compute_seconds))
    row = {key: value for key, value in measured.items() if key != "round_seconds"}
    return {**row, "exposed_comm_ms": exposed, "overlap_pct": overlap_pct(row["comm_ms"], exposed)}


def overlap_pct(comm_ms: float, exposed_ms: float) -> float:
    """The share of the communication time in isolation by which the step is not longer: 0 to 100 %."""
    return 100 * min(1.0, max(0.0, 1 - exposed_ms / comm_ms)) if comm_ms > 0 else 100.0


def recommend(strategy: str, measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The bucket size for a strategy: the fastest, or the default if the difference may be noise.

    Sizes take turns, so each time is compared with the default's time in the same round. The margin is the median of
    these differences, the noise is their spread from the 20th to the 80th percentile, both relative to the default's
    median. A margin counts if it is larger than the noise.
    """
    ours = [one for one in measured if one["strategy"] == strategy]
    default = next(one for one in ours if DEFAULT_BUCKET_MB in (one["bucket_mb"], *one["same_buckets_mb"]))
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


def parts(result: dict[str, Any]) -> list[Table | str]:
    """What the terminal and the page show of a result, as in the JSON file."""
    about = f"{result['model']}, {result['world_size']} ranks, global batch {result['batch_size']}"
    title = f"{about}, {result['rounds']} interleaved rounds"
    asked = ("largest bucket", "step ms p20/p50/p80", "exposed ms", "hidden")
    table = table_of(_COLUMNS, result["rows"], title=title, left=("strategy",), asked=asked)
    return [*command.environment_lines(result["environment"]), table, recommendation(result["recommended"])]


def recommendation(recommended: list[dict[str, Any]]) -> str:
    """One line with the size for each strategy, and how it compares with the default."""
    return "recommended: " + "; ".join(_advice(one) for one in recommended)


def _advice(one: dict[str, Any]) -> str:
    default, noise = size_name(one["default_mb"]), f"the noise of {one['noise_pct']:.1f} %"
    if one["beyond_noise"]:
        faster = f"{one['margin_pct']:.1f} % faster than the default {default}, beyond {noise}"
        return f"{one['strategy']} {size_name(one['bucket_mb'])} ({faster})"
    if one["fastest_mb"] == one["default_mb"]:
        return f"{one['strategy']} {default} (the default, and the fastest)"
    margin = f"{size_name(one['fastest_mb'])} was {one['margin_pct']:.1f} % faster, within {noise}"
    return f"{one['strategy']} {default} (the default; {margin})"


def _sizes(num_bytes: list[int]) -> str:
    return f"{len(num_bytes)} (<= {max(num_bytes) / 2**20:.2g})"


_COLUMNS = {
    "strategy": lambda row: row["strategy"],
    "largest bucket": lambda row: size_name(row["bucket_mb"]),
    "built, MiB": lambda row: _sizes(row["bucket_bytes"]),
    "sent, MiB": lambda row: _sizes(row["sent_bytes"]),
    "step ms p20/p50/p80": lambda row: spread(row["step_ms"]),
    "comm alone ms": number("comm_ms"),
    "exposed ms": number("exposed_comm_ms"),
    "hidden": number("overlap_pct", "{:.0f} %"),
}


def charts(result: dict[str, Any]) -> list[Chart]:
    """A strategy has a gap at a size that was measured for another one alone, so that the sizes stay in order."""
    steps, comm = [], []
    sizes = sorted({row["bucket_mb"] for row in result["rows"]}, key=lambda mb: math.inf if mb is None else mb)
    x = [*map(size_name, sizes)]
    for place, strategy in enumerate(dict.fromkeys(row["strategy"] for row in result["rows"])):
        found = {row["bucket_mb"]: row for row in result["rows"] if row["strategy"] == strategy}
        rows = [found.get(size) for size in sizes]
        times = [row and row["step_ms"] for row in rows]
        steps.append(command.spread_series(strategy, x, times, style="line+points", color=place))
        for name, key in (("alone", "comm_ms"), ("exposed", "exposed_comm_ms")):
            y = [row and row[key] for row in rows]
            comm.append(Series(name=f"{strategy}, {name}", x=x, y=y, style="line+points"))
    return [
        Chart(title="Time of a step by bucket size", x_label="largest bucket", y_label="ms", series=steps),
        Chart(title="Communication by bucket size", x_label="largest bucket", y_label="ms", series=comm),
    ]


KIND = command.Kind(lambda result: "recommended" in result, "Bucket sizes", parts, charts, BucketsConfig, prepare)
