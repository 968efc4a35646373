"""``ddpcore bench predict``: step times predicted from parts measured in isolation, and measured ones."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import median
from typing import Any, NamedTuple, TypeVar

from rich.table import Table

from ddpcore.bench import command
from ddpcore.bench.command import size_name
from ddpcore.bench.config import LARGE, BenchConfig, ResolvedConfig
from ddpcore.bench.contender import DEFAULT_BUCKET_MB, OWN_COMPUTE, Contender, build_dataset, gather, parse_sizes
from ddpcore.bench.isolated import Call, StepTimer, average, averages, bucket_bytes, message_bytes, time_calls
from ddpcore.bench.step_model import Step, Transfer, available_cores, predict
from ddpcore.comm.base import exchange_columns
from ddpcore.comm.connect import TRANSPORTS
from ddpcore.comm.groups import barrier
from ddpcore.display.chart import Chart, Series
from ddpcore.display.table import number, spread, table_of
from ddpcore.ops import WeightAverage
from ddpcore.options.fields import field
from ddpcore.runtime import launch
from ddpcore.runtime.launch import World
from ddpcore.runtime.progress import ProgressReport
from ddpcore.runtime.timing import quantiles
from ddpcore.strategies.base import Plan, Strategy
from ddpcore.strategies.registry import STRATEGIES, is_baseline
from ddpcore.topology.registry import TOPOLOGIES

Part = TypeVar("Part")
KINDS = ("messages", "together", "exchange", "average")
COMPARED = ("ssgd", "dpsgd", "local_sgd")
Parts = Mapping[str, Sequence[Part]]
"""What is measured alone, by kind: ``messages`` with gradients, all of them ``together``, the ``exchange`` of weights
with neighbours, and the ``average`` of weights, of all learners or with such an exchange."""


@dataclass(frozen=True, kw_only=True)
class PredictConfig(BenchConfig):
    """Predict the step time of each strategy from parts measured in isolation, and measure it too."""

    DEFAULTS = LARGE
    EXAMPLE = "ddpcore bench predict --world-size 4 model=resnet18"

    strategies: tuple[str, ...] = field(COMPARED, "comma-separated", parts=STRATEGIES)
    topology: tuple[str, ...] = field(("ring", "random_pair"), "of strategies with neighbours", parts=TOPOLOGIES)
    bucket_mb: tuple[str, ...] = field(("1", "25"), "of averaged gradients: largest bucket in MiB, or 'one'")
    transport: tuple[str, ...] = field(("auto",), choices=TRANSPORTS)
    period: int = field(4, "steps in each turn, and of strategies that have such an option", least=1)
    rounds: int = field(5, "turns of each strategy", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_sizes(self.bucket_mb)
        for name in self.strategies:
            if is_baseline(name):
                raise ValueError(f"--strategies: no part of {name} can be measured alone, leave it out: take ssgd")
            if not self.strategy(name).traits.waits:
                raise ValueError(f"--strategies: learners of {name} wait for nobody, so no step ends: leave it out")

    def benches(self) -> "list[PredictConfig]":
        """This config for each topology and transport. Raises ValueError if they do not go with the settings."""
        has_period = any("period" in STRATEGIES.options(name) for name in self.strategies)
        given = (*self.settings, f"strategy.period={self.period}") if has_period else tuple(self.settings)
        return [
            replace(self, settings=(*given, f"strategy.topology={graph}", f"strategy.transport={name}"))
            for name in self.transport
            for graph in self.topology
        ]


class Turn(NamedTuple):
    """One turn on one rank, in seconds."""

    compute: Transfer  # of a step without communication, until the slowest rank was done; processor time of this rank
    step: float  # of a real step, until the slowest rank was done
    parts: Parts[Transfer]  # of each part of the communication


@dataclass
class Case:
    """A contender, the parts of its communication as blocking calls, and its turns with their plans."""

    contender: Contender
    resolved: ResolvedConfig
    bucket_mb: float | None
    plans: list[list[Plan]]
    parts: Parts[Call]
    turns: list[Turn] = field(list)

    def take_turn(self, compute: Contender, num_steps: int) -> None:
        """Run the step without communication, the real step and the parts one after the other. Collective."""
        before = time.process_time()
        compute.run(num_steps, timed=True)
        cpu = time.process_time() - before
        self.contender.run(num_steps, timed=True)
        device = self.resolved.device
        parts = {kind: [time_calls([call], device) for call in calls] for kind, calls in self.parts.items()}
        seconds, step = (one.block_seconds[-1] / num_steps for one in (compute, self.contender))
        self.turns.append(Turn(Transfer(seconds=seconds, cpu=cpu / num_steps), step, parts))


def prepare(config: PredictConfig, torchrun: World | None) -> Callable[[], None]:
    """Check the config on this machine; return a function that starts the ranks."""
    runs = [command.resolve_ranks(bench, torchrun) for bench in config.benches()]
    first = runs[0]
    build_dataset(first, first=True)
    num_models = 1 + sum(len(_cases(resolved, runs, config)) for resolved in runs)
    command.check_models_memory(num_models, first, "name fewer --topology or --bucket-mb, or a smaller model")
    return command.start_ranks(run_rank, first, runs, config)


def run_rank(world: World, common: ResolvedConfig, runs: list[ResolvedConfig], config: PredictConfig) -> None:
    """What every rank runs; rank 0 prints and writes the result."""
    dataset = build_dataset(common, first=False).to(common.device)
    compute = Contender.build(OWN_COMPUTE, common, world, dataset)
    compute.warm_up()
    cases = []
    plan = [(resolved, *case) for resolved in runs for case in _cases(resolved, runs, config)]
    with ProgressReport("measurements", len(plan) * (1 + config.rounds), shown=world.rank == 0) as progress:
        for resolved, name, bucket_mb in plan:
            contender = Contender.build(name, resolved, world, dataset, bucket_mb or DEFAULT_BUCKET_MB)
            contender.warm_up()
            cases.append(_case(contender, resolved, bucket_mb, config))
            progress.advance(1, name)
        timer = StepTimer(compute)
        for _ in range(config.rounds):
            with timer.hooks():
                barrier("the start of a measurement")
                for _ in range(config.period):
                    timer.step()
            for case in cases:
                case.take_turn(compute, config.period)
                progress.advance(1, case.contender.name)
    cores = launch.num_cores() * max(1, world.world_size // world.local_world_size)
    rows = [row_of(case, gather(case.turns), timer, cores) for case in cases]
    if world.rank == 0:
        step = timer.compute(quantiles(compute.block_seconds)["p50"] / config.period)
        result = {
            "environment": command.environment(common),
            "model": common.training.model.name,
            "world_size": common.world_size,
            "batch_size": common.training.data.batch_size,
            "period": config.period,
            "compute_ms": {name: 1e3 * getattr(step, name) for name in ("forward", "backward", "update")},
            "rows": rows,
        }
        command.publish(result, KIND, config)


def _cases(
    resolved: ResolvedConfig, runs: list[ResolvedConfig], config: PredictConfig
) -> list[tuple[str, float | None]]:
    """Strategies and bucket sizes of a run. Strategies without neighbours are only in the first of each transport."""
    first = next(one for one in runs if one.transport == resolved.transport) is resolved
    cases: list[tuple[str, float | None]] = []
    for name in config.strategies:
        strategy = resolved.config.strategy(name)
        if first or strategy.topology is not None:
            sizes = parse_sizes(config.bucket_mb) if strategy.traits.averages_gradients else [None]
            cases += [(name, size) for size in sizes]
    return cases


def _case(one: Contender, resolved: ResolvedConfig, bucket_mb: float | None, config: PredictConfig) -> Case:
    """A contender after its warm-up, with the communication that its plan has in some turn."""
    strategy, learner = one.strategy, one.active.handle.learner
    assert isinstance(strategy, Strategy)
    assert learner is not None
    first, period = learner.step, config.period
    begins = range(first, first + config.rounds * period, period)
    plans = [[strategy.plan(step) for step in range(begin, begin + period)] for begin in begins]
    comm, flat, steps = learner.comm, learner.flat, count()

    def exchanged() -> WeightAverage:
        assert strategy.topology is not None
        if (size := strategy.traits.group) > 1:
            return exchange_columns(comm, flat.param_LP, strategy.topology, size, next(steps)).mixture()
        return comm.exchange(flat.param_LP, strategy.topology, next(steps), in_place=True).mixture()

    parts: dict[str, list[Call]] = {kind: [] for kind in KINDS}
    if any(plan.averages_gradients for turn in plans for plan in turn):
        parts |= {"messages": averages(one), "together": [lambda: average(one)]}
    if any(plan.averages_weights for turn in plans for plan in turn):
        if strategy.topology is None:
            parts["average"] = [lambda: comm.average_(flat.param_LP, 0).wait()]
        else:
            # The exchange alone moves the parameters to older weights: only times matter here.
            parts["exchange"] = [lambda: flat.move_to(exchanged().out)]
            parts["average"] = [lambda: flat.average_(exchanged())]
    return Case(one, resolved, bucket_mb, plans, parts)


def steps_of(plans: Sequence[Plan], parts: Parts[Transfer], sizes: Sequence[int], overlaps: bool) -> list[Step]:
    """What is sent in each step. ``overlaps``: weights are sent during the computation, see :class:`ddpcore.Traits`."""
    # Averages that run at the same time are faster than one after the other; each gets its share of that time.
    total = sum(message.seconds for message in parts["messages"]) or math.inf
    pairs = [(one.seconds / total, together) for together in parts["together"] for one in parts["messages"]]
    messages = [Transfer(seconds=share * whole.seconds, cpu=share * whole.cpu) for share, whole in pairs]
    hidden, after = None, next(iter(parts["average"]), None)
    if overlaps and after is not None:
        hidden = next(iter(parts["exchange"]), after)
        after = Transfer(seconds=max(0.0, after.seconds - hidden.seconds), cpu=max(0.0, after.cpu - hidden.cpu))
    gradients: Any = {"messages": messages, "sizes": sizes}
    weights: Any = {"hidden": hidden, "after": after}
    return [
        Step(**(gradients if plan.averages_gradients else {}), **(weights if plan.averages_weights else {}))
        for plan in plans
    ]


def row_of(case: Case, everyone: Sequence[Sequence[Turn]], timer: StepTimer, cores: int) -> dict[str, Any]:
    """The row of a case, as in the JSON file: a prediction for each turn from that turn, and medians over turns."""
    contender, resolved, traits = case.contender, case.resolved, case.contender.strategy.traits
    on_cpu = resolved.device == "cpu"
    num_threads = resolved.world_size * launch.threads_per_rank(resolved.world_size)
    sizes = message_bytes(contender)
    predicted, measured, comm = [], [], []
    for plans, turns in zip(case.plans, zip(*everyone, strict=True), strict=True):
        compute = timer.compute(turns[0].compute.seconds, sum(turn.compute.cpu for turn in turns) if on_cpu else 0.0)
        parts = {kind: _slowest([turn.parts[kind] for turn in turns]) for kind in KINDS}
        available = available_cores(compute, cores, num_threads) if on_cpu else math.inf
        steps, background = steps_of(plans, parts, sizes, traits.overlaps), resolved.transport_name in ("pg", "mixed")
        predicted.append(predict(compute, steps, cores=available, background=background))
        measured.append(turns[0].step)
        comm.append(sum(one.seconds for one in (*parts["together"], *(parts["exchange"] or parts["average"]))))
    errors = [100 * (guess / seconds - 1) for guess, seconds in zip(predicted, measured, strict=True)]
    return {
        "strategy": contender.name,
        "topology": resolved.training.strategy.topology if contender.strategy.topology is not None else None,
        "bucket_mb": case.bucket_mb,
        "num_buckets": len(bucket_bytes(contender)) if traits.averages_gradients else None,
        "transport": resolved.transport_name,
        "comm_ms": 1e3 * median(comm),
        "predicted_ms": 1e3 * median(predicted),
        "measured_ms": quantiles(1e3 * seconds for seconds in measured),
        "error_pct": median(errors),
    }


def _slowest(ranks: Sequence[Sequence[Transfer]]) -> list[Transfer]:
    everyone = zip(*ranks, strict=True)
    return [Transfer(seconds=max(one.seconds for one in of), cpu=sum(one.cpu for one in of)) for of in everyone]


def parts(result: dict[str, Any]) -> list[Table | str]:
    """What the terminal and the page show of a result, as in the JSON file."""
    parts = result["compute_ms"]
    about = f"{result['model']}, {result['world_size']} ranks, global batch {result['batch_size']}"
    times = " + ".join(f"{name} {parts[name]:.2f}" for name in ("forward", "backward", "update"))
    title = f"{about}: without communication {times} ms"
    rows = result["rows"]
    asked = ("predicted ms", "measured ms p20/p50/p80", "error")
    table = table_of(_COLUMNS, rows, title=title, left=("strategy", "transport"), asked=asked)
    return [*command.environment_lines(result["environment"]), table, accuracy(rows), verdict(rows)]


def accuracy(rows: list[dict[str, Any]]) -> str:
    """The median and the largest error of the predictions, in one line."""
    errors = [abs(row["error_pct"]) for row in rows]
    worst = rows[errors.index(max(errors))]
    return f"prediction error: median {median(errors):.1f} %, worst {max(errors):.1f} % ({case_name(worst)})"


def verdict(rows: list[dict[str, Any]]) -> str:
    """Whether averaging weights is faster than averaging gradients, predicted and measured for the same two cases.

    Of each side, the case with the smallest predicted time counts. The line also names cases measured as faster.
    """
    gradients = [row for row in rows if row["num_buckets"] is not None]
    weights = [row for row in rows if row["num_buckets"] is None]
    if not gradients or not weights:
        return "will it pay: name ssgd and another strategy to compare"
    keys = (lambda row: row["predicted_ms"], lambda row: row["measured_ms"]["p50"])
    (ours, theirs), fastest = [[min(side, key=key) for side in (weights, gradients)] for key in keys]
    predicted, measured = (key(ours) / key(theirs) for key in keys)
    answer = {2: "yes", 0: "no"}.get((predicted < 1) + (measured < 1), "not clear")
    shares = f"{predicted:.2f} of the time of {case_name(theirs)} as predicted, and {measured:.2f} as measured"
    line = f"will it pay: {answer}: a step of {case_name(ours)} takes {shares}"
    if fastest != [ours, theirs]:
        line += f"; the fastest as measured are {case_name(fastest[0])} and {case_name(fastest[1])}: "
        line += f"{keys[1](fastest[0]) / keys[1](fastest[1]):.2f}"
    return line


def case_name(row: dict[str, Any]) -> str:
    """Strategy, topology, buckets and transport of a row."""
    words = [row["strategy"], row["topology"], row["num_buckets"] and size_name(row["bucket_mb"]), row["transport"]]
    return " ".join(word for word in words if word)


_COLUMNS = {
    "strategy": lambda row: f"{row['strategy']} {row['topology'] or ''}".rstrip(),
    "transport": lambda row: row["transport"] or "-",
    "buckets": lambda row: f"{row['num_buckets']} ({size_name(row['bucket_mb'])})" if row["num_buckets"] else "-",
    "comm alone ms": number("comm_ms"),
    "predicted ms": number("predicted_ms"),
    "measured ms p20/p50/p80": lambda row: spread(row["measured_ms"]),
    "error": number("error_pct", "{:+.1f} %"),
}


def charts(result: dict[str, Any]) -> list[Chart]:
    """The charts of a result, as in the JSON file."""
    names = [case_name(row) for row in result["rows"]]
    predicted = Series(name="predicted", x=names, y=[row["predicted_ms"] for row in result["rows"]])
    measured = command.spread_series("measured", names, [row["measured_ms"] for row in result["rows"]])
    return [Chart(title="Time of a step", kind="bars", x_label="ms", series=[predicted, measured])]


KIND = command.Kind(lambda result: "compute_ms" in result, "Predicted step time", parts, charts, PredictConfig, prepare)
