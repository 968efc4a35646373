"""The embedded digits."""

from __future__ import annotations

from pathlib import Path

import torch

from ddpcore.data import built_in, load_dataset
from ddpcore.data.transforms import Normalization


def test_sizes_and_classes() -> None:
    data = load_dataset("digits")
    assert data.test is not None
    assert (data.input_shape, data.num_classes) == ((1, 8, 8), 10)
    assert (len(data.train), len(data.test)) == (1400, 397)
    counts = data.train.labels.bincount() + data.test.labels.bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # of the UCI test set
    assert sorted(data.train.inputs.unique().tolist()) == [round(255 * value / 16) for value in range(17)]


def test_the_normalization_is_that_of_the_training_images() -> None:
    pixels = built_in.load_digits().train.inputs.double() / 255
    assert (
        Normalization((round(float(pixels.mean()), 4),), (round(float(pixels.std(correction=0)), 4),))
        == built_in.NORMALIZATION
    )


def test_the_file_is_small() -> None:
    assert Path(built_in.__file__).with_name("digits.npz").stat().st_size < 100_000


def test_the_nearest_training_image_has_the_same_label() -> None:
    """Images and labels belong together: the nearest neighbour errs on 1.5 %."""
    data = built_in.load_digits()
    assert data.test is not None
    train, test = (split.inputs.flatten(1).float() for split in (data.train, data.test))
    nearest = torch.cdist(test, train).argmin(1)
    assert (data.train.labels[nearest] != data.test.labels).float().mean() < 0.03
