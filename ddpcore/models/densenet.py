"""DenseNet for small images (Huang et al. 2017, "Densely Connected Convolutional Networks")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddpcore.models.blocks import IMAGE, ImageChain, Shape, Sizes

BOTTLENECK = 4  # channels between a layer's two convolutions, in growth rates
COMPRESSION = 0.5  # share of the channels that a transition keeps


class DenseNet121(ImageChain):
    """DenseNet-BC: four dense blocks, with transitions between them that halve channels, height and width.

    Inputs [B, 3, 32, 32] to logits [B, C]; the stem is a 3 x 3 convolution without stride and pooling. 6956298
    parameters for 10 classes.

    Args:
        blocks: number of layers of each dense block; there must be one, and each number must be at least 1.
        growth_rate: channels that a layer adds, at least 1.
    """

    def __init__(
        self,
        input_shape: Shape = IMAGE,
        num_classes: int = 10,
        *,
        blocks: Sizes = (6, 12, 24, 16),
        growth_rate: int = 32,
    ) -> None:
        if not blocks or min(*blocks, growth_rate) < 1:
            raise ValueError(f"blocks {list(blocks)} and growth_rate {growth_rate}: each must be at least 1")
        channels = 2 * growth_rate
        layers: list[nn.Module] = [nn.Conv2d(input_shape[0], channels, 3, padding=1, bias=False)]
        for block, count in enumerate(blocks):
            if block > 0:
                compressed = int(channels * COMPRESSION)
                layers += [*_norm_relu_conv(channels, compressed), nn.AvgPool2d(2)]
                channels = compressed
            for _ in range(count):
                layers.append(DenseLayer(channels, growth_rate))
                channels += growth_rate
        super().__init__([*layers, nn.BatchNorm2d(channels), nn.ReLU()], channels, num_classes)


class DenseLayer(nn.Module):
    """Norm, ReLU and convolution, 1 x 1 and then 3 x 3; the output is concatenated to the input's channels."""

    def __init__(self, channels: int, growth_rate: int) -> None:
        super().__init__()
        hidden = BOTTLENECK * growth_rate
        self.grow = nn.Sequential(*_norm_relu_conv(channels, hidden), *_norm_relu_conv(hidden, growth_rate, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, channels, H, W] to [B, channels + growth_rate, H, W]."""
        return torch.cat([inputs, self.grow(inputs)], dim=1)


def _norm_relu_conv(channels_in: int, channels_out: int, kernel_size: int = 1) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels_in, channels_out, kernel_size, padding=kernel_size // 2, bias=False)
    return nn.BatchNorm2d(channels_in), nn.ReLU(), convolution
