"""The MLP is 784-50-50-10 with ReLU and flattens images."""

from __future__ import annotations

import pytest
import torch

from ddpcore.models import MODELS
from ddpcore.models.small import MLP


def test_parameters_and_formula() -> None:
    model = MLP((1, 28, 28), 10)
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


def test_hidden_layers() -> None:
    model = MODELS.build("mlp", hidden=(2048, 2048))
    assert sum(p.numel() for p in model.parameters()) == 784 * 2048 + 2048 + 2048 * 2048 + 2048 + 2048 * 10 + 10
    assert [layer.out_features for layer in MODELS.build("mlp", hidden=7).layers if hasattr(layer, "out_features")] == [
        7,
        10,
    ]
    with pytest.raises(ValueError, match=r"model mlp: hidden is \(5, 0\)"):
        MODELS.build("mlp", hidden=(5, 0))
