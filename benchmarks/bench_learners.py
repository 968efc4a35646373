"""The cost of virtual learners: 16 learners with an mlp against one learner, on equally many samples per step.

python benchmarks/bench_learners.py [--learners 16] [--model mlp] [--batch-size 2048] [--seconds 20]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from ddpcore import DPSGD, distribute
from ddpcore.models import MODELS
from ddpcore.optim import FusedSGD
from ddpcore.runtime.machine import machine
from ddpcore.runtime.timing import interleaved
from ddpcore.training.trainer import learner_losses


def training_step(model_name: str, num_learners: int, batch_size: int) -> Callable[[], None]:
    """A function that trains for one step on ``batch_size`` samples in all."""
    torch.manual_seed(0)
    model = MODELS.build(model_name)
    optimizer = FusedSGD(model.parameters(), lr=0.01, momentum=0.9)
    handle = distribute(model, optimizer, DPSGD(), learners=num_learners, vectorize="measure")
    inputs, labels = MODELS.spec(model_name).random_batch(num_learners, batch_size // num_learners)

    def step() -> None:
        optimizer.zero_grad()
        learner_losses(handle.model(inputs), labels, stacked=True).sum().backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, default=16)
    parser.add_argument("--model", default="mlp", choices=MODELS.names())
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    steps = [training_step(arguments.model, n, arguments.batch_size) for n in (1, arguments.learners)]
    one, many = interleaved(steps, "cpu", 10**6, arguments.seconds)
    ratio = statistics.median(a / b for a, b in zip(one, many, strict=True))
    print(machine("cpu"))
    for name, seconds in (("1 learner", one), (f"{arguments.learners} learners", many)):
        quantiles = statistics.quantiles(seconds, n=10)
        rate = arguments.batch_size / statistics.median(seconds)
        print(f"{name:>12}: {rate:12,.0f} samples/s   step ms p20/p50/p80 ", end="")
        print("/".join(f"{1000 * q:.2f}" for q in (quantiles[1], quantiles[4], quantiles[7])))
    print(f"samples/s of {arguments.learners} learners over one: {ratio:.2f} (median over {len(one)} pairs)")


if __name__ == "__main__":
    main()
