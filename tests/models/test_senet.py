"""SENet-18: pre-activation blocks with gates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcore.models.blocks import SqueezeExcitation
from ddpcore.models.residual import PreActivationBlock, SENet18


@pytest.mark.parametrize(("channels_in", "channels_out", "stride"), [(4, 4, 1), (4, 4, 2), (4, 6, 1)])
def test_a_block_adds_its_input(channels_in: int, channels_out: int, stride: int) -> None:
    block = PreActivationBlock(channels_in, channels_out, stride).eval()
    inputs = torch.randn(2, channels_in, 8, 8)
    active = block.activation(inputs)
    plain = stride == 1 and channels_in == channels_out
    assert (block.projection is None) == plain
    carried = inputs if plain else block.projection(active)
    assert torch.equal(block(inputs), block.residual(active) + carried)
    assert isinstance(block.residual[-1], SqueezeExcitation)
    nn.init.zeros_(block.residual[-2].weight)
    assert torch.equal(block(inputs), carried), "without a ReLU on the way of the input"


def test_stages() -> None:
    model, shapes = SENet18((3, 32, 32), 10, blocks=(1, 2), widths=(4, 6)), []
    for module in model.features:
        if isinstance(module, PreActivationBlock):
            module.register_forward_hook(lambda module, inputs, outputs: shapes.append(tuple(outputs.shape[1:])))
    model(torch.randn(2, 3, 32, 32))
    assert shapes == [(4, 32, 32), (6, 16, 16), (6, 16, 16)]


def test_impossible_sizes() -> None:
    with pytest.raises(ValueError, match=r"blocks \[1\] and widths \[4, 6\] must be as many"):
        SENet18((3, 32, 32), 10, blocks=(1,), widths=(4, 6))
