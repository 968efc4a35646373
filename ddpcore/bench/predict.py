"""``python -m ddpcore.bench predict``: step times from parts measured alone, beside what really happens."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ddpcore import launch, models, strategies, topology
from ddpcore.bench import alone, command_line, step_model
from ddpcore.bench import contender as contenders
from ddpcore.bench.alone import Call
from ddpcore.bench.buckets import WARM_UP_STEPS, size_of
from ddpcore.bench.command_line import check_names, flag, names, option, write_json
from ddpcore.bench.config import TOPOLOGIES, BenchConfig, Plan
from ddpcore.bench.contender import DEFAULT_BUCKET_MB, Contender, run_block
from ddpcore.bench.environment import environment
from ddpcore.bench.job import Job, settle_real
from ddpcore.bench.phases import Phases
from ddpcore.bench.run import build_dataset
from ddpcore.bench.step_model import Compute, Machine, Transfer
from ddpcore.comm import Transport
from ddpcore.comm.choice import TRANSPORTS
from ddpcore.launch import World
from ddpcore.metrics import quantiles, to_json
from ddpcore.report.predict import print_predictions

STRATEGIES = ("ssgd", "dpsgd", "local_sgd")
NEVER = 2**40  # a period that no run reaches: local_sgd without an average is a step without communication


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """What is predicted and measured. Constructing one checks all that can be known before.

    Raises:
        ValueError: one line that says what is wrong and what to do.
    """

    world_size: int | None = option(None, "number of ranks (4, or torchrun's)", type=int)
    model: str = option("resnet18", ", ".join(models.names()))
    strategies: tuple[str, ...] = option(STRATEGIES, "comma-separated", metavar="A,B,...", type=names)
    topology: tuple[str, ...] = option(
        ("ring", "random_pair"), f"of dpsgd, of {', '.join(TOPOLOGIES)}", metavar="A,B,...", type=names
    )
    bucket_mb: tuple[str, ...] = option(
        ("1", "25"), "of ssgd: largest bucket in MiB, or 'one'", metavar="A,B,...", type=names
    )
    transport: tuple[str, ...] = option(("auto",), f"of {', '.join(TRANSPORTS)}", metavar="A,B,...", type=names)
    period: int = option(4, "steps between two averages in local_sgd, and of a turn", type=int)
    batch_size: int = option(32, "global, over all ranks", type=int)
    rounds: int = option(5, "turns of each", type=int)
    seed: int = option(0, "of weights, batches and pairs", type=int)
    device: str = option("auto", "auto, cpu, cuda")
    json: Path | None = option(None, "write the result to this file", type=Path, metavar="FILE")

    def __post_init__(self) -> None:
        check_names("strategies", self.strategies, STRATEGIES, "strategy to predict")
        check_names("topology", self.topology, TOPOLOGIES, "topology")
        check_names("transport", self.transport, TRANSPORTS, "transport")
        if self.rounds < 1:
            raise ValueError(f"{flag('rounds')} is {self.rounds}: it must be at least 1")
        if not self.bucket_mb or len({size_of(name) for name in self.bucket_mb}) != len(self.bucket_mb):
            raise ValueError("--bucket-mb is empty or names one twice: name sizes once each, for example 1,25")
        self.benches()

    def benches(self) -> list[BenchConfig]:
        """The runs as a training bench has them, one a topology and transport.

        Raises:
            ValueError: there is none.
        """
        shared = ("world_size", "model", "strategies", "period", "batch_size", "seed", "device", "json")
        common = BenchConfig(**{name: getattr(self, name) for name in shared})
        return [replace(common, topology=one, transport=by) for by in self.transport for one in self.topology]


@dataclass
class Predicted:
    """A contender, the parts of its communication, and what they took alone.

    Attributes:
        parts: blocking calls.
        seconds: a list a round, of each part on this rank.
        cpu: likewise, processor seconds of all parts together.
    """

    contender: Contender
    plan: Plan
    bucket_mb: float | None
    parts: list[Call]
    seconds: list[list[float]] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def prepare(argv: Sequence[str], joined: World | None) -> Job:
    """What the command line says, checked before any process starts.

    Raises:
        ValueError: it cannot be run as it stands; one line.
    """
    config = command_line.parse(
        PredictConfig,
        argv,
        prog="python -m ddpcore.bench predict",
        description="Predict the step time of each strategy from parts measured alone, and measure it too.",
    )
    plans = [settle_real(bench, joined) for bench in config.benches()]
    build_dataset(plans[0], first=True)
    args = (plans, config)
    return Job(worker=run_rank, args=args, world_size=plans[0].world_size, backend=plans[0].choice.backend)


def run_rank(world: World, plans: list[Plan], config: PredictConfig) -> None:
    """The worker of :func:`ddpcore.launch.run`; rank 0 prints and writes."""
    dataset = build_dataset(plans[0], first=False).to(plans[0].device)
    still = replace(plans[0], config=replace(plans[0].config, period=NEVER))
    compute = contenders.build(strategies.LocalSGD.name, still, world, dataset)
    run_block(compute, WARM_UP_STEPS, False)
    fields = []
    for plan in plans:
        for name, bucket_mb in _cases(plan, plans, config):
            contender = contenders.build(name, plan, world, dataset, bucket_mb or DEFAULT_BUCKET_MB)
            run_block(contender, WARM_UP_STEPS, False)
            fields.append(Predicted(contender, plan, bucket_mb, _parts(contender, plan)))
    phases, compute_cpu = Phases(compute), []
    for _ in range(config.rounds):
        with phases.watching():
            alone.barrier()
            for _ in range(config.period):
                phases.step()
        before = time.process_time()
        run_block(compute, config.period, True)
        compute_cpu.append((time.process_time() - before) / config.period)
        for one in fields:
            run_block(one.contender, config.period, True)
            seconds, cpu = alone.time_calls(one.parts, plans[0].device)
            one.seconds.append(seconds)
            one.cpu.append(cpu)
    gathered = [_gather(one) for one in fields]
    base = _compute(compute, phases, compute_cpu, config, plans[0].device)
    if world.rank == 0:
        cores = launch.num_cores() * max(1, world.world_size // world.local_world_size)
        rows = [_row(one, seen, base, config.period, cores) for one, seen in zip(fields, gathered, strict=True)]
        _finish(config, plans[0], base, rows)


def _cases(plan: Plan, plans: list[Plan], config: PredictConfig) -> list[tuple[str, float | None]]:
    """Strategies and bucket sizes of a plan; what knows no topology belongs to the first plan of its transport."""
    first = next(one for one in plans if one.transport == plan.transport) is plan
    cases: list[tuple[str, float | None]] = []
    for name in config.strategies:
        if name == strategies.SSGD.name:
            cases += [(name, size_of(size)) for size in config.bucket_mb if first]
        elif first or name == strategies.DPSGD.name:
            cases.append((name, None))
    return cases


def _parts(one: Contender, plan: Plan) -> list[Call]:
    """Of ssgd each bucket's average, of local_sgd that of all weights, of dpsgd an exchange, and one that is mixed."""
    if one.name == strategies.SSGD.name:
        return alone.averages(one)
    assert one.trainer is not None
    learner = one.trainer.handle.learner
    assert learner is not None
    if one.name == strategies.LocalSGD.name:
        return [lambda: learner.comm.average_(learner.flat.param_LP).wait()]
    graph = topology.build(plan.config.topology, plan.config.seed, plan.config.local_size)
    exchange = partial(learner.comm.exchange, learner.flat.param_LP, graph)
    steps = iter(range(2**62))
    return [lambda: exchange(next(steps)).mixture(), lambda: exchange(next(steps)).mix_()]


def _gather(one: Predicted) -> list[Transfer]:
    """Each part as all ranks saw it: medians over rounds. Collective."""
    everyone = alone.gather((one.seconds, one.cpu))
    cpu = median(sum(of_round) for of_round in zip(*(cpu for _, cpu in everyone), strict=True))
    rounds = [
        [max(part) for part in zip(*of_round, strict=True)]
        for of_round in zip(*(seconds for seconds, _ in everyone), strict=True)
    ]
    seconds = [median(part) for part in zip(*rounds, strict=True)]
    return [Transfer(seconds=part, cpu=cpu * part / max(sum(seconds), 1e-12)) for part in seconds]


def _compute(compute: Contender, phases: Phases, cpu: list[float], config: PredictConfig, device: str) -> Compute:
    """The step without communication: as long as the slowest rank's, in the phases of rank 0. Collective."""
    total_cpu = sum(alone.gather(median(cpu)))
    step = quantiles(compute.block_seconds)["p50"] / config.period
    forward, backward, update = (share * step for share in phases.shares())
    return Compute(
        forward=forward,
        backward=backward,
        update=update,
        cpu=total_cpu if device == "cpu" else 0.0,
        arrivals=phases.arrivals(),
    )


def predict(
    name: str, compute: Compute, parts: Sequence[Transfer], sizes: Sequence[int], period: int, machine: Machine
) -> float:
    """Seconds of a step of a strategy, from the transfers that :func:`_parts` makes."""
    if name == strategies.SSGD.name:
        return step_model.ssgd(compute, parts, sizes, machine)
    if name == strategies.LocalSGD.name:
        return step_model.local_sgd(compute, parts[0], period, machine)
    exchange, mixed = parts
    mix = Transfer(seconds=max(0.0, mixed.seconds - exchange.seconds), cpu=max(0.0, mixed.cpu - exchange.cpu))
    return step_model.dpsgd(compute, exchange, mix, machine)


def _row(one: Predicted, parts: list[Transfer], compute: Compute, period: int, cores: int) -> dict[str, Any]:
    contender, plan = one.contender, one.plan
    assert contender.trainer is not None
    learner = contender.trainer.handle.learner
    assert learner is not None
    transport = plan.transport.name if isinstance(plan.transport, Transport) else None
    machine = Machine(cores=cores if plan.device == "cpu" else math.inf, background=transport == "pg")
    sizes = alone.bucket_bytes(contender)
    predicted = predict(contender.name, compute, parts, sizes, period, machine)
    measured = quantiles(1e3 * seconds / period for seconds in contender.block_seconds)
    return {
        "strategy": contender.name,
        "topology": plan.config.topology if contender.name == strategies.DPSGD.name else None,
        "bucket_mb": one.bucket_mb,
        "num_buckets": len(sizes) if contender.name == strategies.SSGD.name else None,
        "transport": transport,
        "comm_ms": 1e3 * sum(part.seconds for part in parts[: 1 if contender.name == strategies.DPSGD.name else None]),
        "predicted_ms": 1e3 * predicted,
        "measured_ms": measured,
        "error_pct": step_model.error_pct(1e3 * predicted, measured["p50"]),
    }


def _finish(config: PredictConfig, plan: Plan, compute: Compute, rows: list[dict[str, Any]]) -> None:
    result = {
        "environment": environment(plan),
        "model": config.model,
        "world_size": plan.world_size,
        "batch_size": config.batch_size,
        "period": config.period,
        "compute_ms": {name: 1e3 * getattr(compute, name) for name in ("forward", "backward", "update", "cpu")},
        "rows": rows,
    }
    print_predictions(to_json(result))
    if config.json is not None:
        write_json(config.json, result)
