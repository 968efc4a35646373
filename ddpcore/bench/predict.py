"""``python -m ddpcore.bench predict``: step times predicted from parts measured in isolation, and measured ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any

from rich.table import Table

from ddpcore.bench import step_model
from ddpcore.bench.bucket_sizes import DEFAULT_BUCKET_MB, parse_sizes
from ddpcore.bench.command import publish, resolve_ranks, start_ranks
from ddpcore.bench.config import BenchConfig, Options, ResolvedConfig
from ddpcore.bench.contender import (
    OWN_COMPUTE,
    WARM_UP_STEPS,
    Contender,
    build_contender,
    build_dataset,
    gather,
    run_block,
)
from ddpcore.bench.environment import check_models_memory, environment
from ddpcore.bench.isolated_comm import Call, averages, bucket_bytes, message_bytes, time_calls
from ddpcore.bench.result import Kind, environment_lines, size_name
from ddpcore.bench.step_model import Compute, Machine, Transfer
from ddpcore.bench.step_timing import StepTimer
from ddpcore.comm.choice import TRANSPORTS
from ddpcore.comm.groups import barrier
from ddpcore.display.chart import Chart, Series
from ddpcore.display.table import number, spread, table_of
from ddpcore.options.command_line import SETTINGS
from ddpcore.options.fields import field
from ddpcore.parameters.buckets import messages
from ddpcore.runtime import launch
from ddpcore.runtime.launch import World
from ddpcore.runtime.progress import ProgressReport
from ddpcore.runtime.timing import quantiles
from ddpcore.strategies.dpsgd import DPSGD
from ddpcore.strategies.local_sgd import LocalSGD
from ddpcore.strategies.ssgd import SSGD
from ddpcore.topology.registry import TOPOLOGIES

STRATEGIES = (SSGD.name, DPSGD.name, LocalSGD.name)


@dataclass(frozen=True, kw_only=True)
class PredictConfig(Options):
    """Predict the step time of each strategy from parts measured in isolation, and measure it too."""

    EXAMPLE = "python -m ddpcore.bench predict --world-size 4 model=resnet18"

    settings: Sequence[str] = SETTINGS
    world_size: int | None = field(None, "number of ranks (4, or torchrun's)")
    strategies: tuple[str, ...] = field(STRATEGIES, "comma-separated", choices=STRATEGIES)
    topology: tuple[str, ...] = field(("ring", "random_pair"), "of dpsgd", parts=TOPOLOGIES)
    bucket_mb: tuple[str, ...] = field(("1", "25"), "of ssgd: largest bucket in MiB, or 'one'")
    transport: tuple[str, ...] = field(("auto",), choices=TRANSPORTS)
    period: int = field(4, "steps between two averages in local_sgd, and in each turn", least=1)
    rounds: int = field(5, "turns of each strategy", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_sizes(self.bucket_mb)
        self.benches()

    def benches(self) -> list[BenchConfig]:
        """These runs as configs of the comparison of strategies, one for each topology and transport.

        Raises:
            ValueError: the options do not go together.
        """
        settings = ["model=resnet18", "data=synthetic", "data.batch_size=32", *self.settings]
        if LocalSGD.name in self.strategies:
            settings.append(f"strategy.period={self.period}")
        return [
            BenchConfig(
                settings=(*settings, f"strategy.topology={graph}", f"strategy.transport={name}"),
                world_size=self.world_size,
                strategies=self.strategies,
            )
            for name in self.transport
            for graph in self.topology
        ]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn on one rank: a step without communication, a real step, and each part of the communication.

    Attributes:
        compute: seconds of a step without communication, until the slowest rank was done.
        compute_cpu: processor seconds of it on this rank.
        step: seconds of a real step, until the slowest rank was done.
        parts: seconds and processor seconds of each part.
    """

    compute: float
    compute_cpu: float
    step: float
    parts: Sequence[tuple[float, float]]


@dataclass
class Case:
    """A contender, the parts of its communication as blocking calls, and its turns."""

    contender: Contender
    resolved: ResolvedConfig
    bucket_mb: float | None
    parts: list[Call]
    turns: list[Turn] = field(list)

    def take_turn(self, compute: Contender, num_steps: int) -> None:
        """Run the step without communication, the real step and the parts one after the other. Collective."""
        before = time.process_time()
        run_block(compute, num_steps, True)
        cpu = time.process_time() - before
        run_block(self.contender, num_steps, True)
        timed = [time_calls([part], self.resolved.device) for part in self.parts]
        turn = Turn(
            compute=compute.block_seconds[-1] / num_steps,
            compute_cpu=cpu / num_steps,
            step=self.contender.block_seconds[-1] / num_steps,
            parts=[(seconds, part_cpu) for (seconds,), part_cpu in timed],
        )
        self.turns.append(turn)


def prepare(config: PredictConfig, torchrun: World | None) -> Callable[[], None]:
    """Check the config on this machine; return a function that starts the ranks."""
    runs = [resolve_ranks(bench, torchrun) for bench in config.benches()]
    first = runs[0]
    build_dataset(first, first=True)
    num_models = 1 + sum(len(_cases(resolved, runs, config)) for resolved in runs)
    check_models_memory(num_models, first, "name fewer --topology or --bucket-mb, or a smaller model")
    return start_ranks(run_rank, first, runs, config)


def run_rank(world: World, common: ResolvedConfig, runs: list[ResolvedConfig], config: PredictConfig) -> None:
    """What every rank runs; rank 0 prints and writes the result."""
    dataset = build_dataset(common, first=False).to(common.device)
    compute = build_contender(OWN_COMPUTE, common, world, dataset)
    run_block(compute, WARM_UP_STEPS, False)
    cases = []
    plan = [(resolved, *case) for resolved in runs for case in _cases(resolved, runs, config)]
    with ProgressReport("measurements", len(plan) * (1 + config.rounds), shown=world.rank == 0) as progress:
        for resolved, name, bucket_mb in plan:
            contender = build_contender(name, resolved, world, dataset, bucket_mb or DEFAULT_BUCKET_MB)
            run_block(contender, WARM_UP_STEPS, False)
            cases.append(Case(contender, resolved, bucket_mb, _parts(contender, resolved)))
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
    rows = [row_of(case, gather(case.turns), timer, config.period, cores) for case in cases]
    if world.rank == 0:
        step = timer.compute(quantiles(compute.block_seconds)["p50"] / config.period)
        result = {
            "environment": environment(common),
            "model": common.training.model.name,
            "world_size": common.world_size,
            "batch_size": common.training.data.batch_size,
            "period": config.period,
            "compute_ms": {name: 1e3 * getattr(step, name) for name in ("forward", "backward", "update")},
            "rows": rows,
        }
        publish(result, KIND, config)


def _cases(
    resolved: ResolvedConfig, runs: list[ResolvedConfig], config: PredictConfig
) -> list[tuple[str, float | None]]:
    """Strategies and bucket sizes of a run. Strategies without topology are only in the first run of each transport."""
    first = next(one for one in runs if one.transport == resolved.transport) is resolved
    cases: list[tuple[str, float | None]] = []
    for name in config.strategies:
        if name == SSGD.name:
            cases += [(name, size) for size in parse_sizes(config.bucket_mb) if first]
        elif first or name == DPSGD.name:
            cases.append((name, None))
    return cases


def _parts(one: Contender, resolved: ResolvedConfig) -> list[Call]:
    """The communication of a strategy, in the order in which :func:`predict` expects its transfers.

    For ssgd the average of each message and of all at once, for local_sgd the average of all weights, for dpsgd the
    exchange without and with the mix.
    """
    assert one.trainer is not None
    learner = one.trainer.handle.learner
    assert learner is not None
    comm, flat = learner.comm, learner.flat
    graph = resolved.training.make_topology()
    steps = count()

    def together() -> None:
        works = [comm.average_(flat.grad_LP[:, begin:end]) for begin, end in messages(flat)]
        for work in works:
            work.wait()

    def exchange() -> None:  # moves the parameters to older weights: only times matter here
        flat.move_to(comm.exchange_in_place(flat.param_LP, graph, next(steps)).mixture().out)

    def exchange_and_mix() -> None:
        flat.average_(comm.exchange_in_place(flat.param_LP, graph, next(steps)).mixture())

    if one.name == SSGD.name:
        return [*averages(one), together]
    if one.name == LocalSGD.name:
        return [lambda: comm.average_(flat.param_LP).wait()]
    return [exchange, exchange_and_mix]


def predict(
    name: str, compute: Compute, parts: Sequence[Transfer], sizes: Sequence[int], period: int, machine: Machine
) -> float:
    """Seconds of a step of a strategy, from the transfers of :func:`_parts` and the sizes of ssgd's messages."""
    if name == SSGD.name:
        *messages, together = parts
        # Averages that run at the same time are faster than one after the other; each gets its share of that time.
        total = sum(message.seconds for message in messages) or math.inf
        shares = [message.seconds / total for message in messages]
        transfers = [Transfer(seconds=share * together.seconds, cpu=share * together.cpu) for share in shares]
        return step_model.ssgd(compute, transfers, sizes, machine)
    if name == LocalSGD.name:
        return step_model.local_sgd(compute, parts[0], period, machine)
    exchange, mixed = parts
    mix = Transfer(seconds=max(0.0, mixed.seconds - exchange.seconds), cpu=max(0.0, mixed.cpu - exchange.cpu))
    return step_model.dpsgd(compute, exchange, mix, machine)


def row_of(case: Case, everyone: Sequence[Sequence[Turn]], timer: StepTimer, period: int, cores: int) -> dict[str, Any]:
    """The row of a case, as in the JSON file: a prediction for each turn from that turn, and medians over turns."""
    contender, resolved = case.contender, case.resolved
    name, is_dpsgd = contender.name, contender.name == DPSGD.name
    on_cpu = resolved.device == "cpu"
    num_threads = resolved.world_size * launch.threads_per_rank(resolved.world_size)
    sizes = message_bytes(contender)
    predicted, measured, comm = [], [], []
    for turns in zip(*everyone, strict=True):
        compute = timer.compute(turns[0].compute, sum(turn.compute_cpu for turn in turns) if on_cpu else 0.0)
        parts = [
            Transfer(seconds=max(seconds for seconds, _ in ranks), cpu=sum(cpu for _, cpu in ranks))
            for ranks in zip(*(turn.parts for turn in turns), strict=True)
        ]
        available = step_model.available_cores(compute, cores, num_threads) if on_cpu else math.inf
        machine = Machine(cores=available, background=resolved.transport_name in ("pg", "mixed"))
        predicted.append(predict(name, compute, parts, sizes, period, machine))
        measured.append(turns[0].step)
        comm.append(parts[0 if is_dpsgd else -1].seconds)
    errors = [step_model.error_pct(*pair) for pair in zip(predicted, measured, strict=True)]
    return {
        "strategy": name,
        "topology": resolved.training.strategy.topology if is_dpsgd else None,
        "bucket_mb": case.bucket_mb,
        "num_buckets": len(bucket_bytes(contender)) if name == SSGD.name else None,
        "transport": resolved.transport_name,
        "comm_ms": 1e3 * median(comm),
        "predicted_ms": 1e3 * median(predicted),
        "measured_ms": quantiles(1e3 * seconds for seconds in measured),
        "error_pct": median(errors),
    }


def parts(result: dict[str, Any]) -> list[Table | str]:
    """What the terminal and the page show of a result, as in the JSON file."""
    parts = result["compute_ms"]
    title = (
        f"{result['model']}, {result['world_size']} ranks, global batch {result['batch_size']}: without "
        f"communication forward {parts['forward']:.2f} + backward {parts['backward']:.2f} + update "
        f"{parts['update']:.2f} ms"
    )
    rows = result["rows"]
    table = table_of(_COLUMNS, rows, title=title, left=("strategy", "transport"))
    return [*environment_lines(result["environment"]), table, accuracy(rows), verdict(rows)]


def accuracy(rows: list[dict[str, Any]]) -> str:
    """The median and the largest error of the predictions, in one line."""
    errors = [abs(row["error_pct"]) for row in rows]
    worst = rows[errors.index(max(errors))]
    return f"prediction error: median {median(errors):.1f} %, worst {max(errors):.1f} % ({case_name(worst)})"


def verdict(rows: list[dict[str, Any]]) -> str:
    """Whether averaging weights is faster than averaging gradients, predicted and measured for the same two cases.

    The cases are those of each side with the smallest predicted time. If others were measured as faster, it says so.
    """
    gradients = [row for row in rows if row["strategy"] == "ssgd"]
    weights = [row for row in rows if row["strategy"] != "ssgd"]
    if not gradients or not weights:
        return "will it pay: name ssgd and another strategy to compare"
    keys = (lambda row: row["predicted_ms"], lambda row: row["measured_ms"]["p50"])
    (ours, theirs), fastest = [[min(side, key=key) for side in (weights, gradients)] for key in keys]
    predicted, measured = (key(ours) / key(theirs) for key in keys)
    line = (
        f"will it pay: a step of {case_name(ours)} takes {predicted:.2f} of the time of {case_name(theirs)} as "
        f"predicted, and {measured:.2f} as measured"
    )
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
    "buckets": lambda row: (
        "-" if row["num_buckets"] is None else f"{row['num_buckets']} ({size_name(row['bucket_mb'])})"
    ),
    "comm alone ms": number("comm_ms"),
    "predicted ms": number("predicted_ms"),
    "measured ms p20/p50/p80": lambda row: spread(row["measured_ms"]),
    "error": number("error_pct", "{:+.1f} %"),
}


def charts(result: dict[str, Any]) -> list[Chart]:
    """The charts of a result, as in the JSON file."""
    names = [case_name(row) for row in result["rows"]]
    predicted = Series(name="predicted", x=names, y=[row["predicted_ms"] for row in result["rows"]])
    low, middle, high = ([row["measured_ms"][key] for row in result["rows"]] for key in ("p20", "p50", "p80"))
    measured = Series(name="measured", x=names, y=middle, low=low, high=high)
    return [Chart(title="Time of a step", kind="bars", x_label="ms", series=[predicted, measured])]


KIND = Kind(lambda result: "compute_ms" in result, "Predicted step times", parts, charts)
