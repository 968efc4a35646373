"""ShuffleNet: halves that pass, channels in turn, strides."""

from __future__ import annotations

import pytest
import torch

from ddpcore.models.mobile import DownUnit, ShuffleNet, Unit, shuffle


def test_shuffle_puts_channels_in_turn() -> None:
    one, other = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    shuffled = shuffle(one, other)
    assert torch.equal(shuffled[:, 0::2], one) and torch.equal(shuffled[:, 1::2], other)


def test_half_of_the_channels_pass_a_unit() -> None:
    unit, inputs = Unit(6), torch.randn(2, 6, 4, 4)
    outputs = unit(inputs)
    assert torch.equal(outputs[:, 0::2], inputs[:, :3])
    torch.testing.assert_close(outputs[:, 1::2], unit.branch(inputs[:, 3:]))


def test_a_unit_that_strides_uses_all_channels_twice() -> None:
    unit, inputs = DownUnit(3, 8), torch.randn(2, 3, 8, 8)
    outputs = unit(inputs)
    assert outputs.shape == (2, 8, 4, 4)
    torch.testing.assert_close(outputs[:, 0::2], unit.short(inputs))
    torch.testing.assert_close(outputs[:, 1::2], unit.branch(inputs))


def test_stages() -> None:
    model, shapes = ShuffleNet((3, 32, 32), 10, blocks=(2, 1), widths=(6, 8), head_width=12), []
    for module in model.features:
        if isinstance(module, Unit | DownUnit):
            module.register_forward_hook(lambda module, inputs, outputs: shapes.append(tuple(outputs.shape[1:])))
    model(torch.randn(2, 3, 32, 32))
    assert shapes == [(6, 16, 16), (6, 16, 16), (8, 8, 8)]


def test_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="must be as many"):
        ShuffleNet((3, 32, 32), 10, widths=(4, 6))
    with pytest.raises(ValueError, match=r"widths is \[4, 6, 7\], each must be even"):
        ShuffleNet((3, 32, 32), 10, widths=(4, 6, 7))
    with pytest.raises(ValueError, match="head_width is 0"):
        ShuffleNet((3, 32, 32), 10, head_width=0)
