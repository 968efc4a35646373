"""The comparison of strategies: every rank trains with each strategy in turn; rank 0 prints and writes the rows."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ddpcore import data
from ddpcore.bench.command import Kind, bars, environment, environment_lines, has, publish, resolve_here, start_ranks
from ddpcore.bench.config import BenchConfig, ResolvedConfig
from ddpcore.bench.contender import HIDDEN, Contender, build_dataset, compute_of, exposed_ms, gather
from ddpcore.display.chart import Chart, Series
from ddpcore.display.table import number, spread, table_of
from ddpcore.runtime.launch import World
from ddpcore.runtime.progress import ProgressReport
from ddpcore.runtime.timing import quantiles
from ddpcore.strategies.registry import STRATEGIES
from ddpcore.training.build import LearnerPlacement, balanced, threads_for
from ddpcore.training.memory import estimate

REFERENCE = "ddp"  # the row to which the others' speed is related
NUM_BLOCKS = 10  # of each strategy; strategies take turns: A B C D A B C D ...
NOISY = 3.0  # times the 20th percentile of a step that the 80th may be
WARM_UP_SHARE = 0.1  # share of the steps of each strategy that come first and are not timed


def prepare(config: BenchConfig, torchrun: World | None) -> Callable[[], None]:
    """Check the config on this machine; return a function that starts the ranks."""
    resolved = resolve_here(config, torchrun)
    if config.value("data.download") and torchrun is not None:
        raise ValueError("data.download under torchrun: ranks would write the same files, run once without torchrun")
    build_dataset(resolved, first=True)  # a damaged file is reported before ranks start
    start = start_ranks(run_rank, resolved)

    def run() -> None:
        if torchrun is None or torchrun.rank == 0:
            names = ", ".join(resolved.strategies)
            learners = "one learner" if resolved.world_size == 1 else f"{resolved.world_size} learners"
            print(f"{names}: {resolved.num_steps} steps each, with {learners}", file=sys.stderr, flush=True)
        start()

    return run


def run_rank(world: World, resolved: ResolvedConfig) -> None:
    """What every rank runs; rank 0 prints the table and writes the JSON file."""
    dataset = build_dataset(resolved, first=False).to(resolved.device)
    num_ranks = 1 if resolved.is_virtual else resolved.world_size
    placement = balanced(LearnerPlacement.of(resolved.training, None if resolved.is_virtual else world), dataset)
    if sizes := placement.config.data.learners_batch:
        settings = (*resolved.config.settings, f"data.learners_batch={list(sizes)}")
        resolved = replace(resolved, config=replace(resolved.config, settings=settings))
    with threads_for(resolved.train_config(resolved.strategies[0]), dataset, num_ranks):
        _compare(world, resolved, dataset)


def _compare(world: World, resolved: ResolvedConfig, dataset: data.Dataset) -> None:
    config, num_steps = resolved.training, resolved.num_steps
    names = dict.fromkeys(resolved.strategies)
    if not resolved.is_virtual:
        names |= dict.fromkeys(compute_of(name) for name in resolved.strategies if not resolved.is_alone(name))
    contenders = [Contender.build(name, resolved, world, dataset) for name in names]
    if world.rank == 0:  # no contender leaves it idle
        of_first = resolved.train_config(HIDDEN.get(contenders[0].name, contenders[0].name))
        print(estimate(of_first, contenders[0].active), file=sys.stderr, flush=True)
    torch.manual_seed(config.run.seed + 1 + world.rank)  # after all models are built: dropout differs from rank to rank
    with ProgressReport("training steps", num_steps * len(contenders), shown=world.rank == 0) as progress:
        for block, timed in _blocks(num_steps):
            for one in contenders:
                one.run(block, timed=timed)
                progress.advance(block, one.name)
    results = [_gather(one, resolved) for one in contenders]
    if world.rank == 0:
        where = environment(resolved)
        # Which edges of the topology go which way, where ranks of several hosts are connected in two ways.
        comms = {one.name: one.trainer.handle.comm for one in contenders if one.trainer is not None}
        where["notes"] += [
            f"{name}: {comm.description}"
            for name, comm in comms.items()
            if comm.transport == "mixed" and name not in HIDDEN and STRATEGIES.takes(name, "topology")
        ]
        about = {"model": config.model.name, "dataset": config.data.name, "batch_size": config.data.batch_size}
        result = {"environment": where, **about, "steps": num_steps, "rows": _rows(resolved, results)}
        publish(result, KIND, resolved.config)


def _blocks(num_steps: int) -> list[tuple[int, bool]]:
    """(steps, timed) of each block: a warm-up, then up to NUM_BLOCKS of nearly equal length."""
    warm_up = min(num_steps - 1, max(1, round(WARM_UP_SHARE * num_steps))) if num_steps > 1 else 0
    left = num_steps - warm_up
    count = min(NUM_BLOCKS, left)
    lengths = [left // count + (i < left % count) for i in range(count)]
    return ([(warm_up, False)] if warm_up else []) + [(length, True) for length in lengths]


def _gather(one: Contender, resolved: ResolvedConfig) -> dict[str, Any]:
    """What all ranks measured of a contender. Collective."""
    sent = one.bytes_per_step(resolved.world_size)  # before the averages of the evaluation
    losses_SL = torch.stack(one.losses).cpu() if one.losses else None
    nonfinite = [] if one.trainer is None else [(event.step, event.learner) for event in one.trainer.handle.nonfinite]
    seconds, parts, found = zip(*gather((one.step_seconds, losses_SL, nonfinite)), strict=True)
    num_nonfinite = len(set().union(*found))  # all ranks find the same in averaged gradients
    losses_SL = torch.cat([part for part in parts if part is not None], dim=1).double()
    raises = resolved.training.strategy.on_nonfinite == "raise"
    sizes = () if one.trainer is None else one.trainer.batches.sizes
    shares_SL = torch.tensor(sizes or [1.0], dtype=torch.float64) * (losses_SL.isfinite() | raises)
    losses = (losses_SL.where(shares_SL > 0, 0) * shares_SL).sum(dim=1) / shares_SL.sum(dim=1)
    if num_nonfinite and raises:
        losses[-1] = math.nan  # it has diverged
    trainer = None if one.name in HIDDEN else one.trainer
    evaluation, distance = None, None
    if trainer is not None and math.isfinite(losses[-1].item()):
        evaluation = trainer.evaluate(trainer.evaluation_model())
    if trainer is not None and one.strategy.traits.most_learners != 1:
        distance = trainer.handle.consensus_distance()
    return {
        "name": one.name,
        "step_ms": quantiles(1e3 * second for of_rank in seconds for second in of_rank),
        "block_seconds": one.block_seconds,
        "block_samples": one.block_samples,
        "curve": _curve(losses, one.block_seconds, resolved.num_steps),
        "bytes_per_step": sent,
        "loss_first": losses[0].item(),
        "loss_last": losses[-1].item(),
        "test_error_pct": None if evaluation is None else evaluation.error_pct,
        "consensus_distance": distance,
        "num_nonfinite": num_nonfinite,
    }


def _curve(losses: Tensor, block_seconds: Sequence[float], num_steps: int) -> dict[str, list[float]]:
    """The mean loss of each timed block, over the steps and the seconds since the end of the warm-up."""
    lengths = [length for length, _ in _blocks(num_steps)]
    timed = [length for length, timed in _blocks(num_steps) if timed]
    means = [block.mean().item() for block in losses.split(lengths)][-len(timed) :]
    return {"steps": [*accumulate(timed)], "seconds": [*accumulate(block_seconds)], "loss": means}


def _rows(resolved: ResolvedConfig, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each strategy; :func:`publish` replaces NaN and infinity by None."""
    block_seconds = {result["name"]: result["block_seconds"] for result in results}
    steps = [length for length, timed in _blocks(resolved.num_steps) if timed]
    against, rows = block_seconds.get(REFERENCE), []
    for result in results:
        name, seconds = result["name"], result["block_seconds"]
        if name in HIDDEN:
            continue
        is_alone = resolved.is_alone(name)
        exposed, ratio = None, None
        if compute_of(name) in block_seconds and not is_alone:
            exposed = exposed_ms(seconds, block_seconds[compute_of(name)], steps)
        if against is not None:
            ratio = quantiles(theirs / ours for theirs, ours in zip(against, seconds, strict=True))["p50"]
        rates = [num / s for num, s in zip(result["block_samples"], seconds, strict=True)]
        row = {
            "strategy": name,
            "topology": resolved.training.strategy.topology if STRATEGIES.takes(name, "topology") else None,
            "world_size": 1 if is_alone else resolved.world_size,
            "samples_per_s": quantiles(rates)["p50"],
            "step_ms": result["step_ms"],
            "exposed_comm_ms": exposed,
        }
        kept = {key: value for key, value in result.items() if key not in ("name", "block_seconds", "block_samples")}
        rows.append({**row, **kept, "ratio_to_ddp": ratio})
    return rows


def parts(result: dict[str, Any]) -> list[Table | str]:
    """What the terminal and the page show of a result, as in the JSON file."""
    about = {key: result.get(key) for key in ("model", "dataset", "batch_size", "steps")}
    title = "{model} on {dataset}, global batch {batch_size}, {steps} steps".format(**about) if about["steps"] else ""
    table = table_of(_COLUMNS, result["rows"], title=title, left=("strategy",))
    return [*environment_lines(result["environment"]), table, *seen(result["rows"])]


def seen(rows: list[dict[str, Any]]) -> list[str]:
    """What the table shows: the fastest strategy beside ddp, test errors and divergence, a line each."""
    most = max((row["world_size"] for row in rows), default=0)
    rows = [row for row in rows if row["world_size"] == most]  # one learner with the whole batch is no competitor
    lines = []
    against = [row for row in rows if row["ratio_to_ddp"] is not None and row["strategy"] != REFERENCE]
    if against:
        best = max(against, key=lambda row: row["ratio_to_ddp"])
        ratio = f"{best['ratio_to_ddp']:.2f}"
        lines.append(f"speed: {_name(best)} trains {ratio} times as many samples a second as {REFERENCE}")
        if (spread := max(row["step_ms"]["p80"] / row["step_ms"]["p20"] for row in against)) > NOISY:
            longer = f"a fifth of the steps took {spread:.1f} times as long as another"
            lines.append(f"too noisy: {longer}: speeds say little")
    known = sorted((row for row in rows if row["test_error_pct"] is not None), key=lambda row: row["test_error_pct"])
    if len(known) > 1:
        errors = ", ".join(f"{_name(row)} {row['test_error_pct']:.1f} %" for row in known)
        lines.append(f"test error after equally many steps, one seed: {errors}")
    lines += [f"{_name(row)} diverged: take a smaller optimizer.lr" for row in rows if row["loss_last"] is None]
    left_out = [row for row in rows if row.get("num_nonfinite") and row["loss_last"] is not None]
    lines += [f"{_name(row)}: {row['num_nonfinite']} steps of a learner were not finite, left out" for row in left_out]
    return lines


def _name(row: dict[str, Any]) -> str:
    return row["strategy"] + (f" {row['topology']}" if row["topology"] else "")


_COLUMNS = {
    "strategy": _name,
    "test error %": number("test_error_pct"),
    "loss last": number("loss_last", "{:.3f}", "diverged"),
    "samples/s": number("samples_per_s", "{:,.0f}"),
    "vs ddp": number("ratio_to_ddp", "{:.2f}x"),
    "exposed ms": number("exposed_comm_ms"),
    "step ms p20/p50/p80": lambda row: spread(row["step_ms"]),
    "kB/step": lambda row: "-" if row["bytes_per_step"] is None else f"{row['bytes_per_step'] / 1000:,.1f}",
    "loss first": number("loss_first", "{:.3f}"),
    "consensus": number("consensus_distance", "{:.2e}"),
}


def charts(result: dict[str, Any]) -> list[Chart]:
    """The charts of a result, as in the JSON file."""
    rows = result["rows"]
    names = [_name(row) for row in rows]
    first = rows[0]["step_ms"]["p50"] if rows else None
    relative = Series(name="ratio", x=names, y=[row["step_ms"]["p50"] / first for row in rows] if first else [])
    curves = [(name, row["curve"]) for name, row in zip(names, rows, strict=True) if row.get("curve")]
    drawn = []
    for key in ("steps", "seconds"):
        series = [Series(name=name, x=curve[key], y=curve["loss"], style="line+points") for name, curve in curves]
        title, y_label = f"Training loss over {key}", "mean loss"
        drawn.append(Chart(title=title, x_label=key, y_label=y_label, series=series))
    drawn.append(bars("Time of a step", "ms", names, [row["step_ms"] for row in rows]))
    title = f"Time of a step, relative to {names[0] if names else ''}"
    return [*drawn, Chart(title=title, kind="bars", x_label="ratio of medians", series=[relative])]


KIND = Kind(has("samples_per_s"), "Strategies", parts, charts, BenchConfig, prepare)
