"""What every rank does: trains with each strategy in turn, block by block, and gathers what was seen."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ddpcore import data, models, strategies
from ddpcore.bench import contender as contenders
from ddpcore.bench.command_line import write_json
from ddpcore.bench.config import Plan, parse
from ddpcore.bench.contender import HIDDEN, Contender, barrier, compute_of, exposed_ms, run_block
from ddpcore.bench.environment import environment
from ddpcore.bench.gpu import GpuMeter
from ddpcore.bench.job import Job, settle
from ddpcore.engine import Trainer
from ddpcore.launch import World
from ddpcore.metrics import json_number, quantiles, to_json
from ddpcore.report.table import print_report

NUM_BLOCKS = 10  # of each strategy, in turn: A B C D A B C D ...
WARM_UP_SHARE = 0.1  # of the steps, at the start of each strategy, not timed


def prepare(argv: Sequence[str], joined: World | None) -> Job:
    """What the command line says, checked before any process starts.

    Raises:
        ValueError: it cannot be run as it stands; one line.
    """
    config = parse(argv)
    plan = settle(config, joined)
    if config.download and joined is not None:
        raise ValueError("--download under torchrun: ranks would write the same files, run once without torchrun")
    build_dataset(plan, first=True)  # so that a damaged file is one line
    return Job(worker=run_rank, args=(plan,), world_size=plan.world_size, backend=plan.choice.backend)


def build_dataset(plan: Plan, *, first: bool) -> data.Dataset:
    """The data set of the plan, on the CPU; the first time files are fetched and verified, and the model is tried.

    Raises:
        ValueError: files are missing or damaged, the model does not take such samples or options, or the batch is too
            large.
    """
    config = plan.config
    spec = models.spec(config.model)
    options: dict[str, Any] = {}
    if config.dataset == "synthetic":  # made to measure
        options = {"input_shape": spec.input_shapes[0], "num_classes": spec.num_classes}
    dataset = data.build(
        config.dataset,
        data_dir=config.data_dir,
        seed=config.seed,
        normalize=config.normalize,
        augment=config.augment,
        download=config.download and first,
        verify=first,
        **{**options, **(config.dataset_options or {})},
    )
    if first:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):  # which takes neither memory nor time
            contenders.build_model(config, dataset)
    data.ShardedBatches(len(dataset.train), config.batch_size, plan.world_size, config.seed)
    return dataset


def run_rank(world: World, plan: Plan) -> None:
    """The worker of :func:`ddpcore.launch.run`; rank 0 prints the table and writes the JSON file."""
    dataset = build_dataset(plan, first=False).to(plan.device)
    real = plan.choice.backend != "virtual"
    meter = GpuMeter() if plan.device == "cuda" else None
    hidden = dict.fromkeys(compute_of(name) for name in plan.strategies if real and name != strategies.Single.name)
    field = [_build(name, plan, world, dataset, meter) for name in (*plan.strategies, *hidden)]
    torch.manual_seed(plan.config.seed + 1 + world.rank)  # the models are made: dropout differs from rank to rank
    console = Console(stderr=True)
    show = world.rank == 0 and console.is_terminal
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) if show else nullcontext() as progress:
        task = progress.add_task("", total=plan.config.steps * len(field)) if progress else None
        for num_steps, timed in _blocks(plan.config.steps):
            for one in field:
                if progress and task is not None:
                    progress.update(task, description=one.name)
                run_block(one, num_steps, timed, meter)
                if progress and task is not None:
                    progress.advance(task, num_steps)
    results = [_gather(one, plan, meter) for one in field]
    if world.rank == 0:
        result = {"environment": environment(plan), "rows": _rows(plan, results)}
        print_report(to_json(result), plan.config)
        if plan.config.json is not None:
            write_json(plan.config.json, result)


def _build(name: str, plan: Plan, world: World, dataset: data.Dataset, meter: GpuMeter | None) -> Contender:
    """The contender, and on a GPU the memory that it holds from its making on."""
    if meter is not None:
        meter.start()
    one = contenders.build(name, plan, world, dataset)
    if meter is not None and one.trainer is not None:
        meter.stop(name, timed=False)
    return one


def _blocks(num_steps: int) -> list[tuple[int, bool]]:
    """(steps, timed) of each block: a warm-up, then up to NUM_BLOCKS of nearly equal length."""
    warm_up = min(num_steps - 1, max(1, round(WARM_UP_SHARE * num_steps))) if num_steps > 1 else 0
    left = num_steps - warm_up
    count = min(NUM_BLOCKS, left)
    lengths = [left // count + (i < left % count) for i in range(count)]
    return ([(warm_up, False)] if warm_up else []) + [(length, True) for length in lengths]


def _gather(one: Contender, plan: Plan, meter: GpuMeter | None) -> dict[str, Any]:
    """What all ranks saw of a contender. Collective."""
    sent = one.bytes_per_step(plan.world_size)  # before the averages that evaluation takes
    local = {
        "seconds": one.step_seconds,
        "losses": torch.stack(one.losses).cpu() if one.losses else None,
        "gpu": None if meter is None else meter.reading(one.name),
    }
    everyone: list[Any] = [local]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, local)
    losses = torch.cat([seen["losses"] for seen in everyone if seen["losses"] is not None], dim=1).double().mean(dim=1)
    trainer = one.trainer
    compared = trainer is not None and one.name not in HIDDEN
    finite = math.isfinite(losses[-1].item())
    # With one learner there is nothing to average, and rank 0's own model is the averaged one.
    evaluation = trainer.evaluate(trainer.evaluation_model()) if trainer is not None and compared and finite else None
    measured = trainer is not None and compared and one.name != "single"
    distance, consensus_ms = _consensus(trainer) if trainer is not None and measured else (None, None)
    return {
        "name": one.name,
        "step_ms": quantiles([1000 * second for seen in everyone for second in seen["seconds"]]),
        "block_seconds": one.block_seconds,
        "bytes_per_step": sent,
        "loss_first": losses[0].item(),
        "loss_last": losses[-1].item(),
        "test_error_pct": None if evaluation is None else evaluation.error_pct,
        "consensus_distance": distance,
        "consensus_ms": consensus_ms,
        "gpu": [seen["gpu"] for seen in everyone],
    }


def _consensus(trainer: Trainer) -> tuple[float, float]:
    """The distance, and the milliseconds that it took: it is a number at the end, so it waits for a GPU. Collective."""
    barrier()
    start = time.perf_counter()
    distance = trainer.handle.consensus_distance()
    return distance, 1e3 * (time.perf_counter() - start)


def _rows(plan: Plan, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name = {result["name"]: result for result in results}
    ddp = by_name.get("ddp")
    steps = [length for length, timed in _blocks(plan.config.steps) if timed]
    rows = []
    for result in results:
        if result["name"] in HIDDEN:
            continue
        alone = result["name"] == "single"
        rates = [plan.config.batch_size * n / s for n, s in zip(steps, result["block_seconds"], strict=True)]
        compute = by_name.get(compute_of(result["name"]))
        exposed = None
        if compute is not None and not alone:
            exposed = exposed_ms(result["block_seconds"], compute["block_seconds"], steps)
        ratio = None
        if ddp is not None:
            pairs = zip(ddp["block_seconds"], result["block_seconds"], strict=True)
            ratio = quantiles([theirs / ours for theirs, ours in pairs])["p50"]
        rows.append(
            {
                "strategy": result["name"],
                "topology": plan.config.topology if result["name"] in ("dpsgd", "slowmo", "push_sum") else None,
                "world_size": 1 if alone else plan.world_size,
                "samples_per_s": quantiles(rates)["p50"],
                "step_ms": result["step_ms"],
                "exposed_comm_ms": exposed,
                "bytes_per_step": result["bytes_per_step"],
                "loss_first": json_number(result["loss_first"]),
                "loss_last": json_number(result["loss_last"]),
                "test_error_pct": result["test_error_pct"],
                "consensus_distance": result["consensus_distance"],
                "consensus_ms": result["consensus_ms"],
                "ratio_to_ddp": ratio,
                **_gpu(plan, result),
            }
        )
    return rows


def _gpu(plan: Plan, result: dict[str, Any]) -> dict[str, Any]:
    readings = [reading for reading in result["gpu"] if reading is not None]
    if not readings:
        return {}
    row: dict[str, Any] = dict.fromkeys(("gpu_watts", "gpu_utilization_pct", "samples_per_joule"))
    row["gpu_memory_bytes"] = max(reading["memory_bytes"] for reading in readings)
    if all(reading["joules"] for reading in readings):
        timed_steps = sum(length for length, timed in _blocks(plan.config.steps) if timed)
        row["gpu_watts"] = sum(reading["watts"] for reading in readings)
        row["gpu_utilization_pct"] = sum(reading["utilization_pct"] for reading in readings) / len(readings)
        row["samples_per_joule"] = plan.config.batch_size * timed_steps / sum(one["joules"] for one in readings)
    return row
