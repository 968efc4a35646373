"""GoogLeNet: the four ways of a module, and the channels of table 1."""

from __future__ import annotations

import torch
from torch import nn

from ddpcore.models.convolutional import GoogLeNet, Inception


def test_four_ways_side_by_side() -> None:
    module = Inception(5, (1, 2, 3, 4, 5, 6))
    inputs = torch.randn(2, 5, 8, 8)
    parts = module(inputs).split((1, 3, 5, 6), dim=1)
    for part, way in zip(parts, module.ways, strict=True):
        torch.testing.assert_close(part, way(inputs))
    kernels = [[m.kernel_size[0] for m in way if isinstance(m, nn.Conv2d)] for way in module.ways]
    assert kernels == [[1], [1, 3], [1, 3, 3], [1]]
    channels = [[m.out_channels for m in way if isinstance(m, nn.Conv2d)] for way in module.ways]
    assert channels == [[1], [2, 3], [4, 5, 5], [6]]
    assert isinstance(module.ways[3][0], nn.MaxPool2d) and module.channels == 15


def test_channels_after_each_module_are_the_papers() -> None:
    with torch.device("meta"):
        model, shapes = GoogLeNet((3, 32, 32), 10), []
        for module in model.features:
            if isinstance(module, Inception):
                module.register_forward_hook(lambda module, inputs, outputs: shapes.append(tuple(outputs.shape[1:3])))
        model(torch.empty(2, 3, 32, 32))
    before = [(256, 32), (480, 32), (512, 16), (512, 16), (512, 16), (528, 16), (832, 16), (832, 8), (1024, 8)]
    assert shapes == before
