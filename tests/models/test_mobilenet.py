"""MobileNets: depthwise layers, inverted residuals, strides."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcore.models.mobile import InvertedResidual, MobileNet, MobileNetV2


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


def test_separable_layers() -> None:
    stem, *layers = convolutions(MobileNet((3, 32, 32), 10, width=0.25))
    assert stem.out_channels == 8 and len(layers) == 26
    for depthwise, pointwise in zip(layers[::2], layers[1::2], strict=True):
        assert depthwise.groups == depthwise.in_channels == depthwise.out_channels == pointwise.in_channels
        assert (depthwise.kernel_size, pointwise.kernel_size, pointwise.groups) == ((3, 3), (1, 1), 1)
    assert [layer.out_channels for layer in layers[1::2]] == [16, 32, 32, 64, 64] + [128] * 6 + [256] * 2
    assert [layer.stride[0] for layer in layers[::2]] == [1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1]


@pytest.mark.parametrize(("channels_out", "stride"), [(4, 1), (6, 1), (4, 2), (6, 2)])
def test_an_inverted_residual_adds_its_input_unless_it_strides(channels_out: int, stride: int) -> None:
    block, inputs = InvertedResidual(4, channels_out, 3, stride).eval(), torch.randn(2, 4, 8, 8)
    assert [layer.out_channels for layer in convolutions(block.residual)] == [12, 12, channels_out]
    assert not isinstance(block.residual[-1], nn.ReLU), "the bottleneck is linear"
    residual = block.residual(inputs)
    assert residual.shape == (2, channels_out, 8 // stride, 8 // stride)
    if stride == 2:
        assert torch.equal(block(inputs), residual)
    else:
        carried = inputs if channels_out == 4 else block.shortcut(inputs)
        assert torch.equal(block(inputs), residual + carried)


def test_stages_of_the_second_version() -> None:
    model, shapes = MobileNetV2((3, 32, 32), 10, width=0.125), []
    for module in model.features:
        if isinstance(module, InvertedResidual):
            module.register_forward_hook(lambda module, inputs, outputs: shapes.append(tuple(outputs.shape[1:3])))
    model(torch.randn(2, 3, 32, 32))
    sizes = [(2, 32), *[(3, 32)] * 2, *[(4, 16)] * 3, *[(8, 8)] * 4, *[(12, 8)] * 3, *[(20, 4)] * 3, (40, 4)]
    assert shapes == sizes
    assert model.head.linear.in_features == 1280, "kept below a width of 1"
    with torch.device("meta"):
        assert MobileNetV2((3, 32, 32), 10, width=1.5).head.linear.in_features == 1920


def test_impossible_width() -> None:
    for kind in (MobileNet, MobileNetV2):
        with pytest.raises(ValueError, match="width is -1"):
            kind((3, 32, 32), 10, width=-1)
