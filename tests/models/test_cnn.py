"""Two small convolutional networks, held against their formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ddpcore.models.small import MnistCNN, SimpleCNN


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_mnist_cnn() -> None:
    model = MnistCNN((1, 28, 28), 10)
    assert num_parameters(model) == (16 * 9 + 16) + (16 * 28 * 28 * 10 + 10) == 125610
    images = torch.randn(3, 1, 28, 28)
    filters, filter_bias, weight, bias = model.parameters()
    hidden = F.conv2d(images, filters, filter_bias, padding=1).relu()
    torch.testing.assert_close(model(images), hidden.flatten(1) @ weight.T + bias)


@pytest.mark.parametrize(
    ("input_shape", "padding", "count"),
    [
        ((3, 32, 32), 1, (4 * 27 + 4) + (8 * 36 + 8) + (8 * 8 * 8 * 32 + 32) + (320 + 10)),
        ((3, 32, 32), 0, (4 * 27 + 4) + (8 * 36 + 8) + (8 * 6 * 6 * 32 + 32) + (320 + 10)),
        ((1, 28, 28), 1, (4 * 9 + 4) + (8 * 36 + 8) + (8 * 7 * 7 * 32 + 32) + (320 + 10)),
        ((1, 28, 28), 0, (4 * 9 + 4) + (8 * 36 + 8) + (8 * 5 * 5 * 32 + 32) + (320 + 10)),
    ],
)
def test_simple_cnn(input_shape: tuple[int, ...], padding: int, count: int) -> None:
    model = SimpleCNN(input_shape, 10, padding=padding)
    assert num_parameters(model) == count
    images = torch.randn(3, *input_shape)
    weights = list(model.parameters())
    features = images
    for layer in (0, 1):
        features = F.conv2d(features, weights[2 * layer], weights[2 * layer + 1], padding=padding)
        features = F.max_pool2d(features.relu(), 2)
    hidden = (features.flatten(1) @ weights[4].T + weights[5]).relu()
    torch.testing.assert_close(model(images), hidden @ weights[6].T + weights[7])


def test_the_documented_counts() -> None:
    padded, plain = SimpleCNN((3, 32, 32), 10), SimpleCNN((3, 32, 32), 10, padding=0)
    assert (num_parameters(padded), num_parameters(plain)) == (17154, 9986)
    with pytest.raises(ValueError, match="padding is 2"):
        SimpleCNN((3, 32, 32), 10, padding=2)
