"""Random samples with random labels: nothing to learn but the samples, for studies of the optimizer alone."""

from __future__ import annotations

import torch

from ddpcore.data.base import Dataset, Split, generator

INPUT_SHAPE: tuple[int, ...] = (10,)
NUM_CLASSES = 2
NUM_SAMPLES = 1000


def load(input_shape: tuple[int, ...] = INPUT_SHAPE, num_classes: int = NUM_CLASSES, seed: int = 0) -> Dataset:
    """Standard normal samples, float32 [1000, *input_shape], labels uniform over the classes; no test split.

    The seed decides them all and the global generator is left alone. ValueError for an impossible shape or count.
    """
    if not input_shape or any(size < 1 for size in input_shape):
        raise ValueError(f"synthetic: input_shape is {list(input_shape)}, each size must be at least 1")
    if num_classes < 2:
        raise ValueError(f"synthetic: num_classes is {num_classes}, it must be at least 2")
    if seed < 0:
        raise ValueError(f"synthetic: seed is {seed}, it must be at least 0")
    random = generator(seed)
    inputs = torch.randn(NUM_SAMPLES, *input_shape, generator=random)
    labels = torch.randint(num_classes, (NUM_SAMPLES,), generator=random)
    return Dataset("synthetic", Split(inputs, labels), None, num_classes, tuple(input_shape))
