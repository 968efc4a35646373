"""GoogLeNet for small images (Szegedy et al. 2015, "Going Deeper with Convolutions"), with batch normalization."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ddpcore.models.blocks import IMAGE, ImageChain, Shape, conv_norm_relu, scaled

STEM_CHANNELS = 192
_layer = partial(conv_norm_relu, bias=True)
# Rows of table 1: channels of the 1 x 1 branch, before and of the 3 x 3, before and of the 5 x 5, and after pooling.
STAGES = (
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
    and two 3 x 3 convolutions replace one of 5 x 5. 6166250 parameters for 10 classes. ``width`` (above 0) multiplies
    the channels.
    """

    def __init__(self, input_shape: Shape = IMAGE, num_classes: int = 10, *, width: float = 1.0) -> None:
        channels = scaled(STEM_CHANNELS, width)
        layers: list[nn.Module] = [*_layer(input_shape[0], channels, 3)]
        for stage, rows in enumerate(STAGES):
            if stage > 0:
                layers.append(nn.MaxPool2d(3, stride=2, padding=1))
            for row in rows:
                module = Inception(channels, tuple(scaled(base, width) for base in row))
                layers.append(module)
                channels = module.channels
        super().__init__(layers, channels, num_classes)


class Inception(nn.Module):
    """Four parallel branches, whose channels are concatenated.

    ``row`` holds six numbers of channels, in the order of STAGES; ``channels`` is the number in the output.
    """

    def __init__(self, channels_in: int, row: tuple[int, ...]) -> None:
        super().__init__()
        one, before_three, three, before_five, five, pooled = row
        self.channels = one + three + five + pooled
        self.ways = nn.ModuleList(
            (
                nn.Sequential(*_layer(channels_in, one)),
                nn.Sequential(*_layer(channels_in, before_three), *_layer(before_three, three, 3)),
                nn.Sequential(*_layer(channels_in, before_five), *_layer(before_five, five, 3), *_layer(five, five, 3)),
                nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), *_layer(channels_in, pooled)),
            )
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, channels_in, H, W] to [B, channels, H, W]."""
        return torch.cat([way(inputs) for way in self.ways], dim=1)
