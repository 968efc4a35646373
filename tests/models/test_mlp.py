"""The MLP is 784-50-50-10 with ReLU and flattens images."""

from __future__ import annotations

import torch

from ddpcore.models.mlp import MLP


def test_parameters_and_formula() -> None:
    model = MLP()
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    assert shapes == [(50, 784), (50,), (50, 50), (50,), (10, 50), (10,)]
    assert sum(parameter.numel() for parameter in model.parameters()) == 42310
    images = torch.randn(6, 1, 28, 28)
    expected = images.reshape(6, 784)
    weights = list(model.parameters())
    for layer in range(3):
        expected = expected @ weights[2 * layer].T + weights[2 * layer + 1]
        expected = expected.relu() if layer < 2 else expected
    torch.testing.assert_close(model(images), expected)
    torch.testing.assert_close(model(images.reshape(6, 784)), expected)
