"""Handwritten digits of 8 x 8 pixels, which are part of the package: nothing is downloaded.

"Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, UCI Machine Learning Repository 1998,
https://doi.org/10.24432/C50P49, licence CC BY 4.0: the 1797 images of its test set, of 13 writers, as scikit-learn has
them. ``digits.npz`` holds them in a random order (``numpy.random.default_rng(0).permutation(1797)``).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ddpcore.data.base import Dataset, Split
from ddpcore.data.transforms import Normalization

NUM_TRAIN = 1400
NORMALIZATION = Normalization((0.3055,), (0.3758,))


def load() -> Dataset:
    """1400 training and 397 test images uint8 ``[N, 1, 8, 8]``, of 10 classes. Pixels of 0 to 16 are scaled to 255."""
    with np.load(Path(__file__).with_name("digits.npz")) as stored:
        images = torch.from_numpy(stored["images"]).unsqueeze(1)
        labels = torch.from_numpy(stored["labels"]).long()
    pixels = images.float().mul_(255 / 16).round_().to(torch.uint8)
    train, test = (Split(pixels[part], labels[part]) for part in (slice(NUM_TRAIN), slice(NUM_TRAIN, None)))
    return Dataset("digits", train, test, 10, (1, 8, 8), normalization=NORMALIZATION)
