"""The cost of virtual learners: a step of L learners against L models with L optimizers in a plain loop.

One command measures the whole table: DPSGD on a ring, LocalSGD and SSGD with the default settings, and L models without
the package in the order of virtual learners ("by phases"), for models from SimpleNet to six million parameters.
FusedSGD with momentum, 32 samples a learner. All ways run in turn, A/B/A/B, on one thread. A sample is a number of
whole steps; LocalSGD averages in the share of its steps that its period says. Times are those that the processor spent
on this thread, because other programs on a busy machine then disturb less.

PYTHONPATH=. python benchmarks/bench_learners.py [--rows ROW ...] [--ways default vmap in-turn by-learner] [--json FILE]

``by-learner`` runs forward and backward pass of one learner after those of another, by ``handle.split``, so that the
activations of one live at once; ``in-turn`` runs the forward passes of all, and then one backward pass.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import append
from torch import nn

from ddpcore import DPSGD, SSGD, LocalSGD, Ring, Strategy, distribute
from ddpcore.models import MODELS
from ddpcore.optim import FusedSGD
from ddpcore.runtime.machine import machine
from ddpcore.runtime.timing import quantiles
from ddpcore.training.trainer import learner_losses

STRATEGIES: dict[str, Callable[[], Strategy]] = {"dpsgd": lambda: DPSGD(Ring()), "local_sgd": LocalSGD, "ssgd": SSGD}
WAYS = {"default": None, "vmap": True, "in-turn": False, "by-learner": False}
PIXELS = {32: 64, 128: 64, 512: 64, 1024: 64, 2048: 784}  # inputs of an mlp, by the width of its two hidden layers
ROWS = ["simplenet-256", "simplenet-1024", *(f"mlp{width}-{num}" for width in (32, 128, 512, 1024) for num in (4, 16))]
ROWS.append("mlp2048-2")
IMAGES = ["lenet5-8", "resnet18-4"]  # not in the table of the defaults: how much time the memory of one learner costs
FEW_SAMPLES = {"simplenet-1024": 2}  # a learner
WARM_UP = 3

Step = Callable[[], None]


def model_of(row: str) -> tuple[nn.Module, tuple[int, ...], int, int]:
    """Model, shape of a sample, number of classes, and L."""
    name, num = row.split("-")
    torch.manual_seed(0)
    if name == "simplenet":
        return MODELS.build("simplenet"), (10,), 2, int(num)
    if row in IMAGES:
        return MODELS.build(name, input_shape=(3, 32, 32)), (3, 32, 32), 10, int(num)
    width = int(name.removeprefix("mlp"))
    return MODELS.build("mlp", input_shape=(PIXELS[width],), hidden=[width, width]), (PIXELS[width],), 10, int(num)


def optimizer_of(model: nn.Module) -> FusedSGD:
    """With the options of all contenders."""
    return FusedSGD(model.parameters(), lr=0.01, momentum=0.9)


def plain(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> Step:
    """A step of L models, each with an optimizer of its own."""
    models = [copy.deepcopy(model) for _ in inputs]
    optimizers = list(map(optimizer_of, models))

    def step() -> None:
        for own, optimizer, x, y in zip(models, optimizers, inputs, labels, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(own(x), y).backward()
            optimizer.step()

    return step


def by_phases(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> Step:
    """The same in the order of virtual learners: all forward passes, one backward pass, all steps.

    Weights and gradients of a large model leave the caches in between, so this is the least that virtual learners take.
    """
    models = [copy.deepcopy(model) for _ in inputs]
    optimizers = list(map(optimizer_of, models))

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [F.cross_entropy(own(x), y) for own, x, y in zip(models, inputs, labels, strict=True)]
        torch.stack(losses).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def virtual(
    model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, strategy: Strategy, way: str
) -> tuple[Step, Any]:
    """A step of L virtual learners, and their handle."""
    own = copy.deepcopy(model)
    optimizer = optimizer_of(own)
    handle = distribute(own, optimizer, strategy, learners=len(inputs), vectorize=WAYS[way])

    def step() -> None:
        optimizer.zero_grad()
        for x, y in handle.split(inputs, labels, at_once=1 if way == "by-learner" else len(inputs)):
            handle.backward(learner_losses(handle.model(x), y, stacked=True))
        optimizer.step()

    return step, handle


def sample(step: Step, num: int) -> float:
    """Mean seconds of the thread, of so many steps."""
    start = time.thread_time()
    for _ in range(num):
        step()
    return (time.thread_time() - start) / num


def measure(row: str, ways: list[str], seconds: float) -> list[dict[str, Any]]:
    """A result for each strategy and way, and first the plain loop."""
    model, shape, classes, num = model_of(row)
    batch = FEW_SAMPLES.get(row, 32)
    inputs, labels = torch.randn(num, batch, *shape), torch.randint(classes, (num, batch))
    steps: list[Step] = [plain(model, inputs, labels), by_phases(model, inputs, labels)]
    names, handles = [("plain loop", ""), ("by phases", "")], [None, None]
    for strategy, make in STRATEGIES.items():
        for way in ways:
            step, handle = virtual(model, inputs, labels, make(), way)
            steps.append(step)
            handles.append(handle)
            names.append((strategy, way))
    for step in steps:
        sample(step, WARM_UP)
    num_steps = max(1, round(0.05 / sample(steps[0], 1)))
    taken: list[list[float]] = [[] for _ in steps]
    begin = time.perf_counter()
    while len(taken[0]) < 5 or time.perf_counter() - begin < seconds:
        for own, step in zip(taken, steps, strict=True):
            own.append(sample(step, num_steps))
    size = sum(parameter.numel() for parameter in model.parameters())
    return [
        {
            "row": row, "learners": num, "num_parameters": size, "batch_size": batch, "strategy": strategy, "way": way,
            "learners_run": handle.learners_run if handle else "",
            "seconds": quantiles(own), "ratio": quantiles(a / b for a, b in zip(own, taken[0], strict=True)),
            "steps": num_steps * len(own),
        }
        for (strategy, way), handle, own in zip(names, handles, taken, strict=True)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=[*ROWS, *IMAGES])
    parser.add_argument("--ways", nargs="+", default=["default"], choices=list(WAYS))
    parser.add_argument("--seconds", type=float, default=15.0, help="of each row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the results, one JSON object a line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    where = {**machine("cpu"), "threads": 1}
    print(f"{where['device']}, torch {where['torch']}, commit {where['commit']}; L plain loops are 1.00")
    for row in options.rows:
        results = measure(row, options.ways, options.seconds)
        append(options.json, *({**result, **where} for result in results))
        print(
            f"{row}: {results[0]['num_parameters']:,} parameters, "
            f"plain loop {1e3 * results[0]['seconds']['p50']:.2f} ms"
        )
        for result in results[1:]:
            ratio = result["ratio"]
            print(
                f"  {result['strategy']:9} {result['way']:8} {ratio['p50']:.2f} [{ratio['p20']:.2f}-{ratio['p80']:.2f}]"
                f" {1e3 * result['seconds']['p50']:9.2f} ms  {result['learners_run']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
