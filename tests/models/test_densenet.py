"""DenseNet: layers that add channels, transitions that halve."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcore.models.convolutional import DenseLayer, DenseNet121


def test_a_layer_keeps_what_came_in_and_adds_channels() -> None:
    layer, inputs = DenseLayer(5, 3), torch.randn(2, 5, 4, 4)
    outputs = layer(inputs)
    assert outputs.shape == (2, 8, 4, 4)
    assert torch.equal(outputs[:, :5], inputs)
    torch.testing.assert_close(outputs[:, 5:], layer.grow(inputs))
    kinds = [type(module) for module in layer.grow]
    assert kinds == [nn.BatchNorm2d, nn.ReLU, nn.Conv2d] * 2
    assert [layer.grow[2].out_channels, layer.grow[5].out_channels] == [12, 3]


def test_transitions_halve_channels_height_and_width() -> None:
    model, shapes = DenseNet121((3, 32, 32), 10, blocks=(2, 1, 1), growth_rate=4), []
    for module in model.features:
        if isinstance(module, DenseLayer | nn.AvgPool2d):
            module.register_forward_hook(lambda module, inputs, outputs: shapes.append(tuple(outputs.shape[1:3])))
    model(torch.randn(2, 3, 32, 32))
    assert shapes == [(12, 32), (16, 32), (8, 16), (12, 16), (6, 8), (10, 8)]


def test_121_layers() -> None:
    with torch.device("meta"):
        weighted = [m for m in DenseNet121((3, 32, 32), 10).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(weighted) == 121


def test_impossible_sizes() -> None:
    for options in ({"blocks": ()}, {"blocks": (1, 0)}, {"growth_rate": 0}):
        with pytest.raises(ValueError, match="each must be at least 1"):
            DenseNet121((3, 32, 32), 10, **options)
