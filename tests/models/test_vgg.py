"""VGG-19: nineteen layers with weights, five poolings, widths."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcore.models.convolutional import VGG19


def test_layers() -> None:
    model = VGG19((3, 32, 32), 10, width=1 / 16)
    weighted = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(weighted) == 17, "16 convolutions and one linear layer for the paper's three"
    assert [module.out_channels for module in weighted[:-1]] == [4] * 2 + [8] * 2 + [16] * 4 + [32] * 8
    sizes = []
    for module in model.features:
        if isinstance(module, nn.MaxPool2d):
            module.register_forward_hook(lambda module, inputs, outputs: sizes.append(tuple(outputs.shape[1:])))
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert sizes == [(4, 16, 16), (8, 8, 8), (16, 4, 4), (32, 2, 2), (32, 1, 1)]


def test_impossible_width() -> None:
    with pytest.raises(ValueError, match="width is 0"):
        VGG19((3, 32, 32), 10, width=0)
