"""ResNeXt: groups that do not see each other, and what a block adds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcore.models.residual import GroupedBottleneck, ResNeXt29


def test_groups_do_not_see_each_other() -> None:
    block = GroupedBottleneck(4, 8, groups=3, stride=1).eval()
    grouped = block.residual[3]
    assert grouped.groups == 3
    inputs = torch.randn(1, 6, 5, 5)
    changed = inputs.clone()
    changed[:, 2:4] += 1
    same = (grouped(inputs) == grouped(changed)).flatten(2).all(dim=2)[0]
    assert same.tolist() == [True, True, False, False, True, True]


@pytest.mark.parametrize(("channels_in", "stride"), [(12, 1), (12, 2), (4, 1)])
def test_a_block_adds_its_input(channels_in: int, stride: int) -> None:
    block = GroupedBottleneck(channels_in, 12, groups=2, stride=stride).eval()
    inputs = torch.randn(2, channels_in, 8, 8)
    nn.init.zeros_(block.residual[-1].weight)
    expected = inputs if channels_in == 12 and stride == 1 else block.shortcut(inputs)
    assert block(inputs).shape == (2, 12, 8 // stride, 8 // stride)
    assert torch.equal(block(inputs), expected.relu())


def test_stages() -> None:
    model, shapes = ResNeXt29((3, 32, 32), 10, blocks=(1, 2, 1), cardinality=2, base_width=3), []
    for module in model.features:
        if isinstance(module, GroupedBottleneck):
            module.register_forward_hook(lambda module, inputs, outputs: shapes.append(tuple(outputs.shape[1:])))
    model(torch.randn(2, 3, 32, 32))
    assert shapes == [(12, 32, 32), (24, 16, 16), (24, 16, 16), (48, 8, 8)]


@pytest.mark.parametrize(("cardinality", "millions"), [(8, 34.4), (16, 68.1)])
def test_the_papers_variants_have_their_published_sizes(cardinality: int, millions: float) -> None:
    """8 x 64d and 16 x 64d as the paper has them, cut after one digit."""
    with torch.device("meta"):
        model = ResNeXt29((3, 32, 32), 10, cardinality=cardinality)
    assert sum(parameter.numel() for parameter in model.parameters()) // 100_000 == round(10 * millions)


def test_impossible_sizes() -> None:
    for options in ({"blocks": ()}, {"blocks": (0,)}, {"cardinality": 0}, {"base_width": 0}):
        with pytest.raises(ValueError, match="each must be at least 1"):
            ResNeXt29((3, 32, 32), 10, **options)
