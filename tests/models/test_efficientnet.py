"""EfficientNet-B0: stages, gates, and the multipliers of compound scaling."""

from __future__ import annotations

import pytest
import torch

from ddpcore.models.blocks import SqueezeExcitation
from ddpcore.models.mobile import EfficientNetB0, InvertedResidual


def shapes_of(model: EfficientNetB0) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    for module in model.features:
        if isinstance(module, InvertedResidual):
            assert isinstance(module.residual[-1], SqueezeExcitation)
            module.register_forward_hook(lambda module, inputs, outputs: shapes.append(tuple(outputs.shape[1:3])))
    model(torch.randn(2, 3, 32, 32))
    return shapes


def test_stages() -> None:
    sizes = [(2, 16), *[(3, 16)] * 2, *[(5, 8)] * 2, *[(10, 4)] * 3, *[(14, 4)] * 3, *[(24, 2)] * 4, (40, 1)]
    assert shapes_of(EfficientNetB0((3, 32, 32), 10, width=0.125)) == sizes


def test_depth_multiplies_blocks_and_rounds_up() -> None:
    assert [channels for channels, _ in shapes_of(EfficientNetB0((3, 32, 32), 10, width=0.125, depth=0.5))] == [
        *(2, 3, 5, 10, 10, 14, 14, 24, 24, 40)
    ]
    assert len(shapes_of(EfficientNetB0((3, 32, 32), 10, width=0.125, depth=1.1))) == 2 + 3 + 3 + 4 + 4 + 5 + 2


def test_the_gate_acts_before_the_input_is_added() -> None:
    gate = SqueezeExcitation(4)
    block, inputs = InvertedResidual(4, 4, 2, 1, gate).eval(), torch.randn(2, 4, 8, 8)
    torch.testing.assert_close(block(inputs), gate(block.residual[:-1](inputs)) + inputs)


def test_impossible_multipliers() -> None:
    with pytest.raises(ValueError, match="width is 0"):
        EfficientNetB0((3, 32, 32), 10, width=0)
    with pytest.raises(ValueError, match="depth is -1"):
        EfficientNetB0((3, 32, 32), 10, depth=-1)


def test_a_block_of_stride_2_adds_its_output_without_the_gate() -> None:
    """As kuangliu's pytorch-cifar: out * w + out; without ``add_ungated`` out * w, as in the paper."""
    models = [EfficientNetB0((3, 32, 32), 10, width=0.25, depth=0.5, add_ungated=add) for add in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    blocks = [[m for m in model.eval().modules() if isinstance(m, InvertedResidual)] for model in models]
    num_strided = 0
    for added, gated in zip(*blocks, strict=True):
        x = torch.randn(2, added.residual[0].in_channels, 8, 8)
        out = added.residual[:-1](x)
        w = added.residual[-1].gate(out.mean(dim=(2, 3)))[:, :, None, None]
        if added.shortcut is None:
            num_strided += 1
            assert torch.equal(added(x), out * w + out)
            assert torch.equal(gated(x), out * w)
        else:
            assert torch.equal(added(x), gated(x))
    assert num_strided == 5
