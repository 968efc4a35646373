"""A training run against a bare torch loop of the same arithmetic: LeNet-5 on images of CIFAR-100's shape.

    python benchmarks/bench_training.py [--batch-size 128 256] [--threads 2] [--device auto] [--json FILE]

Ours is the work of ``ddpcore.training.train`` between two evaluations: batches, learning rate, step, check of the loss.
The bare loop draws a permutation for each epoch, augments in the same way, and steps ``torch.optim.SGD(fused=True)``.
Blocks of 20 steps run in turn, with a third contender that only makes batches; the ratio is the median over pairs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import add_options, append, parse
from timing import interleaved

from ddpcore.data import Augmentation, Dataset, Normalization, Split
from ddpcore.models import MODELS
from ddpcore.runtime.machine import machine
from ddpcore.runtime.timing import quantiles
from ddpcore.training import TrainConfig
from ddpcore.training.build import LearnerPlacement, build_trainer
from ddpcore.training.loop import CHECK_EVERY
from ddpcore.training.progress import Progress

NUM_SAMPLES, NUM_CLASSES, SHAPE = 50_000, 100, (3, 32, 32)


def images(device: str) -> Dataset:
    """Random pixels: the time of a step does not depend on their values."""
    inputs = torch.randint(256, (NUM_SAMPLES, *SHAPE), dtype=torch.uint8)
    split = Split(inputs, torch.randint(NUM_CLASSES, (NUM_SAMPLES,)))
    dataset = Dataset("random", split, None, NUM_CLASSES, SHAPE).to(device)
    return dataset.transformed(Normalization((0.5,) * 3, (0.25,) * 3), Augmentation())


def run_of(batch_size: int, dataset: Dataset, device: str) -> Callable[[], None]:
    """A function that runs twenty steps of ``train``."""
    config = TrainConfig.from_dict(
        {
            "run": {"epochs": 100, "device": device},
            "data": {"batch_size": batch_size},
            "optimizer": {"lr": 0.01, "momentum": 0.9},
        }
    )
    trainer = build_trainer(LearnerPlacement.of(config, None), dataset)
    progress = Progress.start(1, dataset.train.labels.device)

    def block() -> None:
        for _ in range(CHECK_EVERY):
            progress.add(trainer.step())
        progress.check(trainer.handle.comm, False, None)

    return block


def bare_loop(batch_size: int, dataset: Dataset, device: str, *, train: bool) -> Callable[[], None]:
    """A function that runs twenty steps without ddpcore's loop, or with ``train=False`` only makes their batches."""
    torch.manual_seed(0)
    model = MODELS.build("lenet5", input_shape=SHAPE, num_classes=NUM_CLASSES).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    step, order = 0, torch.randperm(NUM_SAMPLES)
    total = torch.zeros((), device=device)

    def block() -> None:
        nonlocal step, order
        for _ in range(CHECK_EVERY):
            epoch, position = divmod(step, NUM_SAMPLES // batch_size)
            if position == 0:
                order = torch.randperm(NUM_SAMPLES)
            inputs, labels = dataset.train.batch(order[position * batch_size :][:batch_size], epoch)
            step += 1
            if train:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
                total.add_(loss.detach())
        total.item()

    return block


def measure(batch_size: int, device: str, repeats: int) -> dict[str, Any]:
    """One row: images per second of both, their ratio, and the share of the time that making batches takes."""
    dataset = images(device)
    contenders = [
        run_of(batch_size, dataset, device),
        bare_loop(batch_size, dataset, device, train=True),
        bare_loop(batch_size, dataset, device, train=False),
    ]
    ours, bare, batches = interleaved(contenders, device, repeats)
    num_images = CHECK_EVERY * batch_size
    return {
        "case": "training lenet5 3x32x32 to 100",
        "batch_size": batch_size,
        "threads": torch.get_num_threads(),
        "images_per_s": quantiles(num_images / seconds for seconds in ours),
        "bare_images_per_s": quantiles(num_images / seconds for seconds in bare),
        "ratio": quantiles(b / a for a, b in zip(ours, bare, strict=True)),
        "batches_share": quantiles(part / whole for part, whole in zip(batches, ours, strict=True)),
        "repeats": repeats,
        **machine(device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--threads", type=int, default=2)
    add_options(parser, repeats=15)
    options = parse(parser)
    torch.set_num_threads(options.threads)
    print(f"{'batch':>6}{'images/s':>12}{'bare torch':>12}{'ratio':>8}  (p20-p80){'batches':>12}")
    for batch_size in options.batch_size:
        row = measure(batch_size, options.device, options.repeats)
        ours, bare, ratio, share = (row[k] for k in ("images_per_s", "bare_images_per_s", "ratio", "batches_share"))
        spread = f"({ratio['p20']:.2f}-{ratio['p80']:.2f})"
        print(
            f"{batch_size:>6}{ours['p50']:>12.0f}{bare['p50']:>12.0f}{ratio['p50']:>8.3f}  {spread}"
            f"{100 * share['p50']:>10.1f} %"
        )
        append(options.json, row)


if __name__ == "__main__":
    main()
