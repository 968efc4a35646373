"""Residual networks: sizes of stages, what a block adds, and parameter counts by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcore.models.residual import BasicBlock, ResNet, ResNet18


def count_by_hand(channels: int, blocks: tuple[int, ...], widths: tuple[int, ...], num_classes: int) -> int:
    """Convolutions have no bias, a norm has scale and shift, a block that changes shape has a 1 x 1 convolution."""
    count = 9 * channels * widths[0] + 2 * widths[0]
    before = widths[0]
    for stage, (num_blocks, width) in enumerate(zip(blocks, widths, strict=True)):
        for block in range(num_blocks):
            count += 9 * before * width + 9 * width * width + 4 * width
            if before != width or (stage > 0 and block == 0):
                count += before * width + 2 * width
            before = width
    return count + before * num_classes + num_classes


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameter_counts() -> None:
    by_hand = count_by_hand(3, (2, 2, 2, 2), (64, 128, 256, 512), 10)
    assert num_parameters(ResNet18((3, 32, 32), 10)) == by_hand == 11173962
    assert num_parameters(ResNet((3, 32, 32), 10)) == count_by_hand(3, (1, 1, 1, 1), (16, 32, 64, 128), 10) == 308826
    other = ResNet((1, 28, 28), 7, blocks=(2, 1, 3), widths=(8, 8, 24))
    assert num_parameters(other) == count_by_hand(1, (2, 1, 3), (8, 8, 24), 7)


def test_stages_after_the_first_halve_the_image() -> None:
    model = ResNet((3, 32, 32), 10, blocks=(2, 1, 2), widths=(4, 8, 8))
    shapes = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, outputs: shapes.append(tuple(outputs.shape[1:])))
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert shapes == [(4, 32, 32), (4, 32, 32), (8, 16, 16), (8, 8, 8), (8, 8, 8)]


@pytest.mark.parametrize(("channels_in", "channels_out", "stride"), [(4, 4, 1), (4, 4, 2), (4, 6, 1), (4, 6, 2)])
def test_a_block_adds_its_input(channels_in: int, channels_out: int, stride: int) -> None:
    """With the last norm's scale at zero the residual vanishes, and the shortcut alone is left."""
    block = BasicBlock(channels_in, channels_out, stride).eval()
    inputs = torch.randn(2, channels_in, 8, 8)
    nn.init.zeros_(block.residual[-1].weight)
    plain = stride == 1 and channels_in == channels_out
    assert isinstance(block.shortcut, nn.Identity) == plain
    expected = inputs if plain else block.shortcut(inputs)
    assert expected.shape == (2, channels_out, 8 // stride, 8 // stride)
    assert torch.equal(block(inputs), expected.relu())
    nn.init.ones_(block.residual[-1].weight)
    assert torch.equal(block(inputs), (block.residual(inputs) + expected).relu())


def test_layers_of_a_block() -> None:
    kinds = [type(layer) for layer in BasicBlock(4, 6, 2).residual]
    assert kinds == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Conv2d, nn.BatchNorm2d]


def test_impossible_sizes() -> None:
    for blocks, widths in (((1, 1), (8,)), ((), ()), ((0,), (8,)), ((1,), (0,))):
        with pytest.raises(ValueError, match=r"blocks \[.*\] and widths \[.*\] must be as many, each at least 1"):
            ResNet((3, 32, 32), 10, blocks=blocks, widths=widths)
