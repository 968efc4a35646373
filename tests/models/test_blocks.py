"""The shared blocks: what a gate does, when a shortcut is one, and widths."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcore.models.blocks import PooledHead, SqueezeExcitation, conv_norm, conv_norm_relu, scaled, shortcut


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_keep_the_size_but_for_the_stride(kernel_size: int, stride: int) -> None:
    layers = nn.Sequential(*conv_norm_relu(4, 6, kernel_size, stride=stride, groups=2))
    outputs = layers(torch.randn(2, 4, 8, 8))
    assert outputs.shape == (2, 6, 8 // stride, 8 // stride) and outputs.min() == 0
    convolution, _ = conv_norm(4, 6, kernel_size, groups=2)
    assert convolution.bias is None and convolution.weight.shape == (6, 2, kernel_size, kernel_size)
    assert conv_norm(4, 6, bias=True)[0].bias is not None


def test_a_shortcut_is_nothing_where_shapes_agree() -> None:
    assert isinstance(shortcut(4, 4, 1), nn.Identity)
    for channels_out, stride in ((4, 2), (6, 1), (6, 2)):
        outputs = shortcut(4, channels_out, stride)(torch.randn(2, 4, 8, 8))
        assert outputs.shape == (2, channels_out, 8 // stride, 8 // stride)


def test_a_gate_by_its_formula() -> None:
    block = SqueezeExcitation(6, reduction=3)
    inputs = torch.randn(2, 6, 4, 5)
    first, _, second, _ = block.gate
    assert first.weight.shape == (2, 6)
    means = inputs.flatten(2).mean(dim=2)
    hidden = (means @ first.weight.T + first.bias).relu()
    gates = 1 / (1 + torch.exp(-(hidden @ second.weight.T + second.bias)))
    torch.testing.assert_close(block(inputs), inputs * gates.view(2, 6, 1, 1))
    assert SqueezeExcitation(6).gate[0].weight.shape == (1, 6), "one unit at least"


def test_the_head_sees_the_mean_alone() -> None:
    head, inputs = PooledHead(3, 5), torch.randn(2, 3, 4, 4)
    expected = head.linear(inputs.flatten(2).mean(dim=2))
    torch.testing.assert_close(head(inputs), expected)
    torch.testing.assert_close(head(inputs.flip(2, 3)), expected)


def test_widths() -> None:
    assert [scaled(64, width) for width in (1, 0.5, 0.25, 0.001, 1.1)] == [64, 32, 16, 1, 70]
    for width in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"width is .*: it must be above 0"):
            scaled(64, width)
