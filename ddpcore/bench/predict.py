"""``python -m ddpcore.bench predict``: step times from parts measured alone, beside what really happens."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from ddpcore import launch, models, strategies, topology
from ddpcore.bench import alone, command_line, step_model
from ddpcore.bench import contender as contenders
from ddpcore.bench.alone import Call
from ddpcore.bench.buckets import WARM_UP_STEPS, check_memory, size_of
from ddpcore.bench.command_line import check_names, flag, names, option, write_json
from ddpcore.bench.config import TOPOLOGIES, BenchConfig, Plan
from ddpcore.bench.contender import DEFAULT_BUCKET_MB, OWN_COMPUTE, Contender, run_block
from ddpcore.bench.environment import environment
from ddpcore.bench.job import Job, settle_real
from ddpcore.bench.phases import Phases
from ddpcore.bench.run import build_dataset
from ddpcore.bench.step_model import Compute, Machine, Transfer
from ddpcore.buckets import messages
from ddpcore.comm.choice import TRANSPORTS
from ddpcore.launch import World
from ddpcore.metrics import quantiles, to_json
from ddpcore.report.predict import print_predictions

STRATEGIES = ("ssgd", "dpsgd", "local_sgd")


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


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A turn on one rank: the step without communication, the real one, and each part of the communication alone.

    Attributes:
        compute, step: seconds of a step, until the slowest rank was done.
        compute_cpu: processor seconds of a step without communication.
        parts: seconds and processor seconds of each part.
    """

    compute: float
    compute_cpu: float
    step: float
    parts: list[tuple[float, float]]


@dataclass
class Predicted:
    """A contender, the parts of its communication as blocking calls, and its turns."""

    contender: Contender
    plan: Plan
    bucket_mb: float | None
    parts: list[Call]
    turns: list[Turn] = field(default_factory=list)

    def take_turn(self, compute: Contender, num_steps: int) -> None:
        """What is compared runs one after the other. Collective."""
        before = time.process_time()
        run_block(compute, num_steps, True)
        cpu = time.process_time() - before
        run_block(self.contender, num_steps, True)
        parts = []
        for part in self.parts:
            (seconds,), part_cpu = alone.time_calls([part], self.plan.device)
            parts.append((seconds, part_cpu))
        turn = Turn(
            compute=compute.block_seconds[-1] / num_steps,
            compute_cpu=cpu / num_steps,
            step=self.contender.block_seconds[-1] / num_steps,
            parts=parts,
        )
        self.turns.append(turn)


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
    num_cases = sum(len(_cases(plan, plans, config)) for plan in plans)
    check_memory(1 + num_cases, plans[0], "name fewer --topology or --bucket-mb, or a smaller --model")
    args = (plans, config)
    return Job(worker=run_rank, args=args, world_size=plans[0].world_size, backend=plans[0].choice.backend)


def run_rank(world: World, plans: list[Plan], config: PredictConfig) -> None:
    """The worker of :func:`ddpcore.launch.run`; rank 0 prints and writes."""
    dataset = build_dataset(plans[0], first=False).to(plans[0].device)
    compute = contenders.build(OWN_COMPUTE, plans[0], world, dataset)
    run_block(compute, WARM_UP_STEPS, False)
    fields = []
    for plan in plans:
        for name, bucket_mb in _cases(plan, plans, config):
            contender = contenders.build(name, plan, world, dataset, bucket_mb or DEFAULT_BUCKET_MB)
            run_block(contender, WARM_UP_STEPS, False)
            fields.append(Predicted(contender, plan, bucket_mb, _parts(contender, plan)))
    phases = Phases(compute)
    for _ in range(config.rounds):
        with phases.watching():
            alone.barrier()
            for _ in range(config.period):
                phases.step()
        for one in fields:
            one.take_turn(compute, config.period)
    cores = launch.num_cores() * max(1, world.world_size // world.local_world_size)
    rows = [row_of(one, alone.gather(one.turns), phases, config.period, cores) for one in fields]
    if world.rank == 0:
        _finish(config, plans[0], phases, compute, rows)


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
    """Of ssgd each message's average and all at once, of local_sgd that of all weights, of dpsgd exchange and mix."""
    assert one.trainer is not None
    learner = one.trainer.handle.learner
    assert learner is not None
    comm, flat = learner.comm, learner.flat
    if one.name == strategies.SSGD.name:

        def together() -> None:
            works = [comm.average_(flat.grad_LP[:, begin:end]) for begin, end in messages(flat)]
            for work in works:
                work.wait()

        return [*alone.averages(one), together]
    if one.name == strategies.LocalSGD.name:
        return [lambda: comm.average_(flat.param_LP).wait()]
    graph = topology.build(plan.config.topology, plan.config.seed, plan.config.local_size)
    steps = count()

    def gossip(*, mixes: bool) -> None:
        exchange = comm.lend(flat.param_LP, graph, next(steps))
        mixture = exchange.mixture()
        if mixture is None:
            exchange.mix_() if mixes else exchange.abandon()
        elif mixes:
            flat.mix_(mixture)
        else:
            flat.move_to(mixture.out)  # to older weights: here only times count

    return [lambda: gossip(mixes=False), lambda: gossip(mixes=True)]


def predict(
    name: str, compute: Compute, parts: Sequence[Transfer], sizes: Sequence[int], period: int, machine: Machine
) -> float:
    """Seconds of a step of a strategy, from the transfers that :func:`_parts` times."""
    if name == strategies.SSGD.name:
        *sent, together = parts
        # Averages that are under way together are faster than one after the other; each has its share of that time.
        alone_seconds = sum(message.seconds for message in sent)
        shares = [message.seconds / alone_seconds if alone_seconds > 0 else 0.0 for message in sent]
        averages = [Transfer(seconds=share * together.seconds, cpu=share * together.cpu) for share in shares]
        return step_model.ssgd(compute, averages, sizes, machine)
    if name == strategies.LocalSGD.name:
        return step_model.local_sgd(compute, parts[0], period, machine)
    exchange, mixed = parts
    mix = Transfer(seconds=max(0.0, mixed.seconds - exchange.seconds), cpu=max(0.0, mixed.cpu - exchange.cpu))
    return step_model.dpsgd(compute, exchange, mix, machine)


def row_of(
    one: Predicted, everyone: Sequence[Sequence[Turn]], phases: Phases, period: int, cores: int
) -> dict[str, Any]:
    """What the JSON file holds of a contender: each turn is predicted from itself; medians over turns."""
    contender, plan = one.contender, one.plan
    name, is_dpsgd = contender.name, contender.name == strategies.DPSGD.name
    transport = None if plan.transport is None else plan.transport.name
    on_cpu = plan.device == "cpu"
    num_threads = plan.world_size * launch.threads_per_rank(plan.world_size)
    sizes = alone.sent_bytes(contender)
    predicted, measured, comm = [], [], []
    for turns in zip(*everyone, strict=True):
        compute = phases.compute(turns[0].compute, sum(turn.compute_cpu for turn in turns) if on_cpu else 0.0)
        parts = [
            Transfer(seconds=max(seconds for seconds, _ in ranks), cpu=sum(cpu for _, cpu in ranks))
            for ranks in zip(*(turn.parts for turn in turns), strict=True)
        ]
        given = step_model.cores_to_have(compute, cores, num_threads) if on_cpu else math.inf
        machine = Machine(cores=given, background=transport == "pg")
        predicted.append(predict(name, compute, parts, sizes, period, machine))
        measured.append(turns[0].step)
        comm.append(parts[0 if is_dpsgd else -1].seconds)
    errors = [step_model.error_pct(*pair) for pair in zip(predicted, measured, strict=True)]
    return {
        "strategy": name,
        "topology": plan.config.topology if is_dpsgd else None,
        "bucket_mb": one.bucket_mb,
        "num_buckets": len(alone.bucket_bytes(contender)) if name == strategies.SSGD.name else None,
        "transport": transport,
        "comm_ms": 1e3 * median(comm),
        "predicted_ms": 1e3 * median(predicted),
        "measured_ms": quantiles(1e3 * seconds for seconds in measured),
        "error_pct": median(errors),
    }


def _finish(config: PredictConfig, plan: Plan, phases: Phases, still: Contender, rows: list[dict[str, Any]]) -> None:
    compute = phases.compute(quantiles(still.block_seconds)["p50"] / config.period)
    result = {
        "environment": environment(plan),
        "model": config.model,
        "world_size": plan.world_size,
        "batch_size": config.batch_size,
        "period": config.period,
        "compute_ms": {name: 1e3 * getattr(compute, name) for name in ("forward", "backward", "update")},
        "rows": rows,
    }
    print_predictions(to_json(result))
    if config.json is not None:
        write_json(config.json, result)
