"""The demo: synchronous SGD and DPSGD on the embedded digits, at growing learning rates, with several seeds.

Averaging weights while computing (DPSGD) trains at larger learning rates than averaging gradients (SSGD): see the study
``mnist-effective-lr`` for the published effect and its explanation.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch.nn import functional as F

from ddpcore.bench.command import Kind, publish
from ddpcore.bench.config import Options
from ddpcore.data import Dataset, load_dataset
from ddpcore.display.chart import Chart, Series
from ddpcore.display.table import table_of
from ddpcore.distributed.distribute import distribute
from ddpcore.models import MODELS
from ddpcore.optim.sgd import FusedSGD
from ddpcore.options.fields import SEED_RANGE, field
from ddpcore.runtime.launch import World
from ddpcore.runtime.progress import ProgressReport
from ddpcore.strategies.dpsgd import DPSGD
from ddpcore.strategies.ssgd import SSGD
from ddpcore.topology.regular import Complete

LEARNING_RATES = (0.3, 1.0, 1.2, 1.8)
STRATEGIES: dict[str, Callable[[], SSGD | DPSGD]] = {"ssgd": SSGD, "dpsgd": partial(DPSGD, topology=Complete())}
NAMES = {"ssgd": "SSGD: averages gradients", "dpsgd": "DPSGD: averages weights"}
FAILED_PCT = 20.0  # a test error above this says that the run has failed


@dataclass(frozen=True, kw_only=True)
class DemoConfig(Options):
    """One minute: SSGD and DPSGD on embedded handwritten digits, at growing learning rates, with several seeds."""

    EXAMPLE = "ddpcore demo --plot demo.png"

    seeds: int = field(4, "runs of each strategy at each learning rate", least=1)
    steps: int = field(400, "steps of each run", least=1)
    learners: int = field(5, "virtual learners", least=2)
    batch_size: int = field(200, "samples of each learner", least=1)
    seed: int = field(0, "the first seed", **SEED_RANGE)


def prepare(config: DemoConfig, torchrun: World | None) -> Callable[[], None]:
    """Check that it can run here; return a function that runs it."""
    if torchrun is not None:
        raise ValueError("the demo runs in one process: start it without torchrun")

    def run() -> None:
        torch.set_num_threads(1)  # the model is so small that threads only wait for each other
        publish(measure(config), KIND, config)

    return run


def measure(config: DemoConfig) -> dict[str, Any]:
    """The result as in the JSON file: a row for each learning rate and strategy, with the test error of each seed."""
    dataset, start = load_dataset("digits"), time.perf_counter()
    cases = [(lr, name) for lr in LEARNING_RATES for name in STRATEGIES]
    rows = []
    with ProgressReport("runs", len(cases) * config.seeds) as progress:
        for lr, name in cases:
            errors = []
            for seed in range(config.seed, config.seed + config.seeds):
                errors.append(_test_error_pct(config, dataset, name, lr, seed))
                progress.advance(1, f"{name}, learning rate {lr:g}")
            found = {"test_error_pct": errors, "median_pct": median(errors)}
            num_failed = sum(error > FAILED_PCT for error in errors)
            rows.append({"lr": lr, "strategy": name, **found, "num_failed": num_failed})
    settings = {name: getattr(config, name) for name in ("learners", "batch_size", "steps", "seeds")}
    return {**settings, "failed_above_pct": FAILED_PCT, "seconds": time.perf_counter() - start, "rows": rows}


def _test_error_pct(config: DemoConfig, dataset: Dataset, strategy: str, lr: float, seed: int) -> float:
    """Train five virtual learners, as any loop with ``distribute`` does, and test their average. Percent."""
    torch.manual_seed(seed)
    model = MODELS.build("mlp", input_shape=dataset.input_shape)  # 64-50-50-10
    optimizer = FusedSGD(model.parameters(), lr=lr)
    handle = distribute(model, optimizer, STRATEGIES[strategy](), learners=config.learners)
    samples = torch.Generator().manual_seed(seed)
    for _ in range(config.steps):
        indices = torch.randint(len(dataset.train), (config.learners, config.batch_size), generator=samples)
        inputs, labels = dataset.train.batch(indices)
        optimizer.zero_grad()
        loss = F.cross_entropy(handle.model(inputs).flatten(0, 1), labels.flatten())
        (loss * config.learners).backward()  # the sum of the learners' losses
        optimizer.step()
    assert dataset.test is not None
    inputs, labels = dataset.test.batch(torch.arange(len(dataset.test)))
    with torch.no_grad():
        wrong = handle.evaluation_model()(inputs).argmax(dim=1) != labels
    return 100 * wrong.double().mean().item()


def parts(result: dict[str, Any]) -> list[Table | str]:
    """What the terminal and the page show of a result, as in the JSON file."""
    samples = f"{result['learners']} learners x {result['batch_size']} handwritten digits"
    title = f"{samples}, {result['steps']} steps, {result['seeds']} seeds"
    return [table_of(_COLUMNS, result["rows"], title=title, left=("strategy",), group="lr"), seen(result)]


def seen(result: dict[str, Any]) -> str:
    """At how many of the runs each strategy failed, by learning rate, in one sentence."""
    rows = {(row["lr"], row["strategy"]): row["num_failed"] for row in result["rows"]}
    gaps = {lr: rows[lr, "ssgd"] - rows[lr, "dpsgd"] for lr, _ in rows}
    lr = max(gaps, key=lambda lr: gaps[lr])
    if gaps[lr] <= 0:
        return "No learning rate here separates the two strategies."
    return (
        f"At learning rate {lr:g}, {rows[lr, 'ssgd']} of {result['seeds']} runs of SSGD fail (test error above "
        f"{result['failed_above_pct']:g} %), and {rows[lr, 'dpsgd']} of DPSGD: it averages weights, not gradients."
    )


def charts(result: dict[str, Any]) -> list[Chart]:
    """The test error of each run over the learning rate, and a line through the medians."""
    series = []
    for strategy, color in (("ssgd", 1), ("dpsgd", 0)):
        rows, name = [row for row in result["rows"] if row["strategy"] == strategy], NAMES[strategy]
        medians = Series(name=name, x=[row["lr"] for row in rows], y=[row["median_pct"] for row in rows], color=color)
        x = [row["lr"] for row in rows for _ in row["test_error_pct"]]
        y = [error for row in rows for error in row["test_error_pct"]]
        series += [medians, Series(name=f"{strategy}, a run", x=x, y=y, style="points", color=color, group=name)]
    title = f"{result['learners']} learners, handwritten digits: each run, and the median"
    return [Chart(title=title, x_label="learning rate", y_label="test error, %", series=series, log_y=True)]


_COLUMNS = {
    "learning rate": lambda row: f"{row['lr']:g}",
    "strategy": lambda row: row["strategy"],
    "test error %, median": lambda row: f"{row['median_pct']:.1f}",
    "best to worst": lambda row: f"{min(row['test_error_pct']):.1f} to {max(row['test_error_pct']):.1f}",
    "failed": lambda row: f"{row['num_failed']} of {len(row['test_error_pct'])}",
}


KIND = Kind(lambda result: "failed_above_pct" in result, "Handwritten digits", parts, charts, DemoConfig, prepare)
