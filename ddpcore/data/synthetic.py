"""Random samples for studies of optimizers: with random labels, or of a loss with a known strict saddle point."""

from __future__ import annotations

import torch

from ddpcore.data.base import Dataset, Split, generator
from ddpcore.options.typed import check_range

INPUT_SHAPE: tuple[int, ...] = (10,)
NUM_CLASSES = 2
NUM_SAMPLES = 1000
SADDLE_CLASSES = 2


def load_synthetic(
    input_shape: tuple[int, ...] = INPUT_SHAPE, num_classes: int = NUM_CLASSES, seed: int = 0
) -> Dataset:
    """Standard normal samples float32 ``[1000, *input_shape]`` with uniformly random labels; no test split.

    They depend on the seed only, not on torch's global generator. ValueError if the shape is empty or a size is below
    1, there are fewer than 2 classes, or the seed is negative.
    """
    if not input_shape or any(size < 1 for size in input_shape):
        raise ValueError(f"synthetic: input_shape is {list(input_shape)}, each size must be at least 1")
    check_range("synthetic: num_classes", num_classes, least=2)
    check_range("synthetic: seed", seed, least=0)
    random = generator(seed)
    inputs = torch.randn(NUM_SAMPLES, *input_shape, generator=random, dtype=torch.float32, device="cpu")
    labels = torch.randint(num_classes, (NUM_SAMPLES,), generator=random, device="cpu")
    return Dataset("synthetic", Split(inputs, labels), None, num_classes, tuple(input_shape))


def load_saddle(
    seed: int = 0, *, dimension: int = 10, num_samples: int = 1024, slope: float = 0.3, coupling: float = 0.1
) -> Dataset:
    """The data set of the model `saddle`: its mean loss over these samples has a strict saddle point.

    Samples float32 ``[2 (dimension - 1)]`` in random order. All have label 1, and there is no test split.

    A sample holds a vector p and then a vector q. Their elements are normal with standard deviation ``slope`` in p and
    ``coupling`` in q. The negative of each sample is also a sample, so p and q have mean zero. The samples depend on
    the arguments only, not on torch's global generator.

    Raises:
        ValueError: the dimension is below 2, the number of samples is odd or below 2, or another argument is negative.
    """
    check_range("saddle: dimension", dimension, least=2)
    if num_samples < 2 or num_samples % 2:
        raise ValueError(f"saddle: num_samples is {num_samples}: it must be even and at least 2")
    for name, value in (("slope", slope), ("coupling", coupling), ("seed", seed)):
        check_range(f"saddle: {name}", value, least=0)
    random = generator(seed)
    half = torch.randn(num_samples // 2, 2, dimension - 1, generator=random, dtype=torch.float32, device="cpu")
    half *= torch.tensor([[slope], [coupling]], dtype=torch.float32, device="cpu")
    samples = torch.cat([half, -half]).flatten(1)[torch.randperm(num_samples, generator=random, device="cpu")]
    labels = torch.ones(num_samples, dtype=torch.int64, device="cpu")
    return Dataset("saddle", Split(samples, labels), None, SADDLE_CLASSES, tuple(samples.shape[1:]))
