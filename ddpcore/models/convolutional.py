"""Convolutional networks for small images, without residual sums: VGG, GoogLeNet and DenseNet.

Simonyan & Zisserman 2015, "Very Deep Convolutional Networks"; Szegedy et al. 2015, "Going Deeper with Convolutions";
Huang et al. 2017, "Densely Connected Convolutional Networks".
"""

from functools import partial

import torch
from torch import Tensor, nn

from ddpcore.models.blocks import ImageChain, Shape, Sizes, conv_norm_relu, scaled

VGG_E = ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))  # convolutions and channels: configuration E of table 1


class VGG19(ImageChain):
    """Sixteen 3 x 3 convolutions in five stages, each ending with 2 x 2 max pooling, and one linear layer.

    Inputs [B, 3, 32, 32] to logits [B, C]. One linear layer replaces the paper's three: an image of 32 x 32 is one
    pixel after five poolings. ``width`` (above 0) multiplies the channels.
    """

    def __init__(self, input_shape: Shape, num_classes: int, *, width: float = 1.0) -> None:
        layers: list[nn.Module] = []
        channels = input_shape[0]
        for num_convolutions, base in VGG_E:
            for _ in range(num_convolutions):
                layers += conv_norm_relu(channels, scaled(base, width), 3, bias=True)
                channels = scaled(base, width)
            layers.append(nn.MaxPool2d(2))
        super().__init__(layers, channels, num_classes)


GOOGLENET_STEM = 192
_layer = partial(conv_norm_relu, bias=True)
# Rows of table 1: channels of the 1 x 1 branch, before and of the 3 x 3, before and of the 5 x 5, and after pooling.
INCEPTION = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)


class GoogLeNet(ImageChain):
    """A 3 x 3 convolution, nine inception modules in three stages, mean pooling and a linear layer.

    Inputs [B, 3, 32, 32] to logits [B, C]. The stem has no stride and no pooling, there are no auxiliary classifiers,
    and two 3 x 3 convolutions replace one of 5 x 5. ``width`` (above 0) multiplies the channels.
    """

    def __init__(self, input_shape: Shape, num_classes: int, *, width: float = 1.0) -> None:
        channels = scaled(GOOGLENET_STEM, width)
        layers: list[nn.Module] = [*_layer(input_shape[0], channels, 3)]
        for stage, rows in enumerate(INCEPTION):
            if stage > 0:
                layers.append(nn.MaxPool2d(3, stride=2, padding=1))
            for row in rows:
                module = Inception(channels, tuple(scaled(base, width) for base in row))
                layers.append(module)
                channels = module.channels
        super().__init__(layers, channels, num_classes)


class Inception(nn.Module):
    """Four parallel branches, whose channels are concatenated.

    ``row`` holds six numbers of channels, in the order of INCEPTION; ``channels`` is the number in the output.
    """

    def __init__(self, channels_in: int, row: tuple[int, ...]) -> None:
        super().__init__()
        one, before_three, three, before_five, five, pooled = row
        self.channels = one + three + five + pooled
        ways = (
            _layer(channels_in, one),
            (*_layer(channels_in, before_three), *_layer(before_three, three, 3)),
            (*_layer(channels_in, before_five), *_layer(before_five, five, 3), *_layer(five, five, 3)),
            (nn.MaxPool2d(3, stride=1, padding=1), *_layer(channels_in, pooled)),
        )
        self.ways = nn.ModuleList(nn.Sequential(*layers) for layers in ways)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, channels_in, H, W] to [B, channels, H, W]."""
        return torch.cat([way(inputs) for way in self.ways], dim=1)


BOTTLENECK = 4  # channels between a layer's two convolutions, in growth rates
COMPRESSION = 0.5  # share of the channels that a transition keeps


class DenseNet121(ImageChain):
    """DenseNet-BC: four dense blocks, with transitions between them that halve channels, height and width.

    Inputs [B, 3, 32, 32] to logits [B, C]; the stem is a 3 x 3 convolution without stride and pooling. ``blocks`` is
    the number of layers of each dense block. Each layer adds ``growth_rate`` channels.
    """

    def __init__(
        self, input_shape: Shape, num_classes: int, *, blocks: Sizes = (6, 12, 24, 16), growth_rate: int = 32
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
