"""How many threads compute a run: one for small models, whose threads would only wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddpcore.data import Dataset
from ddpcore.training.build import build_model
from ddpcore.training.config import TrainConfig

LEAST_WORK = 2e7
"""Operations of a forward pass below which one thread computes. Measured on two cores: at 12 million operations (an mlp
with 1000 digits) two threads are slower than one, at 27 million (LeNet-5 with 32 images) they are 1.2 times as fast."""
PER_INPUT = 20  # operations for each number of the samples, for models without matrix products


def forward_work(config: TrainConfig, dataset: Dataset, num_ranks: int) -> float:
    """The operations of one forward pass of a process: the products of its batch, and a share for each input number.

    It depends on the config and on the shape of the samples only, so it is the same on every machine.
    A model whose weights alone need ``LEAST_WORK`` is not called.

    Args:
        config: the run.
        dataset: the data set.
        num_ranks: ranks that share the batch.
    """
    num_samples = max(1, config.data.batch_size // (num_ranks * config.data.accumulation))
    dtype = torch.int64 if dataset.has_tokens else torch.float32
    inputs = torch.zeros(1, *dataset.input_shape, dtype=dtype)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = build_model(config, dataset, torch.device("cpu")).eval()
        products = 2 * sum(parameter.numel() for parameter in model.parameters())  # of most models the least
        if num_samples * products < LEAST_WORK:
            products = max(products, _products(model, inputs))
    return float(num_samples * (products + PER_INPUT * inputs.numel()))


def _products(model: nn.Module, inputs: Tensor) -> int:
    """Operations of the linear layers and convolutions in a forward pass."""
    counts: list[int] = []

    def count(layer: nn.Module, _: Any, output: Any) -> None:
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim > 1 and isinstance(output, Tensor):
            counts.append(2 * output.numel() * weight[0].numel())

    for layer in model.modules():
        layer.register_forward_hook(count)
    model(inputs)
    return sum(counts)


@contextmanager
def threads_for(config: TrainConfig, dataset: Dataset, num_ranks: int) -> Iterator[None]:
    """Inside, torch computes with one thread if the model is small, else with as many as before.

    The rule does not look at a clock, because sums may have other bits with another number of threads.

    Args:
        config: the run.
        dataset: the data set.
        num_ranks: ranks that share the batch.
    """
    before = torch.get_num_threads()
    on_cpu = config.run.device == "cpu" or not torch.cuda.is_available()
    if on_cpu and before > 1 and forward_work(config, dataset, num_ranks) < LEAST_WORK:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
