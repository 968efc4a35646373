"""Random samples with random labels, for studies of optimizers: a model can only memorize them."""

from __future__ import annotations

import torch

from ddpcore.data.base import Dataset, Split, generator
from ddpcore.options.typed import check_range

INPUT_SHAPE: tuple[int, ...] = (10,)
NUM_CLASSES = 2
NUM_SAMPLES = 1000


def load(input_shape: tuple[int, ...] = INPUT_SHAPE, num_classes: int = NUM_CLASSES, seed: int = 0) -> Dataset:
    """Standard normal samples float32 ``[1000, *input_shape]`` with uniformly random labels; no test split.

    They depend on the seed only, not on torch's global generator. ValueError if the shape is empty or a size is below
    1, there are fewer than 2 classes, or the seed is negative.
    """
    if not input_shape or any(size < 1 for size in input_shape):
        raise ValueError(f"synthetic: input_shape is {list(input_shape)}, each size must be at least 1")
    check_range("synthetic: num_classes", num_classes, least=2)
    check_range("synthetic: seed", seed, least=0)
    random = generator(seed)
    inputs = torch.randn(NUM_SAMPLES, *input_shape, generator=random)
    labels = torch.randint(num_classes, (NUM_SAMPLES,), generator=random)
    return Dataset("synthetic", Split(inputs, labels), None, num_classes, tuple(input_shape))
