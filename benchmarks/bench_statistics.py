"""The time that noise statistics add to a step: LeNet-5 with virtual learners that average gradients.

    python benchmarks/bench_statistics.py [--learners 2] [--batch-size 256] [--every 50] [--device auto] [--json FILE]

Blocks of ``--every`` steps run in turn: without statistics, the same again (which shows the noise of the machine), with
the statistics that need no extra passes, and with all. The ratio to the first is the median over pairs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import add_options, append, parse
from timing import interleaved

import ddpcore
from ddpcore.diagnostics import NoiseStatistics
from ddpcore.models import MODELS
from ddpcore.optim import FusedSGD
from ddpcore.runtime.machine import machine
from ddpcore.runtime.timing import quantiles

WATCHED = ("off", "off again", "free", "all")


def block_of(watched: str, options: argparse.Namespace) -> Callable[[], None]:
    """A function that trains for ``--every`` steps, of which one is measured."""
    torch.manual_seed(0)
    model = MODELS.build("lenet5", input_shape=(3, 32, 32), num_classes=100).to(options.device)
    optimizer = FusedSGD(model.parameters(), lr=0.05, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=options.learners)
    inputs = torch.randn(options.learners, options.batch_size, 3, 32, 32, device=options.device)
    labels = torch.randint(100, (options.learners * options.batch_size,), device=options.device)

    def loss() -> torch.Tensor:
        """The sum of the learners' losses."""
        return options.learners * F.cross_entropy(handle.model(inputs).flatten(0, 1), labels)

    if not watched.startswith("off"):
        passes = {"loss": loss, "full_loss": loss} if watched == "all" else {}
        NoiseStatistics(handle, optimizer, options.every, batch_size=options.batch_size, **passes)

    def block() -> None:
        for _ in range(options.every):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

    return block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=256, help="of each learner")
    parser.add_argument("--every", type=int, default=50, help="steps from one record to the next")
    add_options(parser, repeats=10)
    options = parse(parser)
    samples = interleaved([block_of(name, options) for name in WATCHED], options.device, options.repeats)
    for name, seconds in zip(WATCHED, samples, strict=True):
        row = {
            "case": f"statistics lenet5, {options.learners} learners, every {options.every} steps: {name}",
            "numel": options.learners * options.batch_size,
            "ms": quantiles(1e3 * one / options.every for one in seconds),
            "ratio": quantiles(one / off for one, off in zip(seconds, samples[0], strict=True)),
            "repeats": options.repeats,
            "threads": torch.get_num_threads(),
            **machine(options.device),
        }
        ratio = row["ratio"]
        print(f"{name:>10}{row['ms']['p50']:>10.3f} ms{ratio['p50']:>8.3f}  ({ratio['p20']:.3f}-{ratio['p80']:.3f})")
        append(options.json, row)


if __name__ == "__main__":
    main()
