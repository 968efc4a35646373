"""EfficientNet for small images (Tan & Le 2019, "EfficientNet: Rethinking Model Scaling")."""

from __future__ import annotations

import math

from torch import nn

from ddpcore.models.blocks import IMAGE, ImageChain, Shape, SqueezeExcitation, conv_norm_relu, scaled
from ddpcore.models.mobilenet import InvertedResidual
from ddpcore.options.typed import check_range

STEM_CHANNELS = 32
# Expansion, channels, blocks and stride of each stage, B0 of table 1.
STAGES = ((1, 16, 1, 2), (6, 24, 2, 1), (6, 40, 2, 2), (6, 80, 3, 2), (6, 112, 3, 1), (6, 192, 4, 2), (6, 320, 1, 2))


class EfficientNetB0(ImageChain):
    """A 3 x 3 convolution, sixteen inverted residuals with a gate on their output, mean pooling and a linear layer.

    Inputs [B, 3, 32, 32] to logits [B, C]. This is the lighter variant that is common for CIFAR-10: all depthwise
    convolutions are 3 x 3, gates act on a block's output with a reduction of 16, activations are ReLU, and there is no
    last 1 x 1 convolution. A block of stride 2 returns the gated output only, as in the paper; kuangliu's pytorch-cifar
    adds the ungated output. 2912089 parameters for 10 classes.

    Args:
        width: multiplies the channels, above 0.
        depth: multiplies the blocks of each stage (rounded up), above 0.
    """

    def __init__(
        self, input_shape: Shape = IMAGE, num_classes: int = 10, *, width: float = 1.0, depth: float = 1.0
    ) -> None:
        check_range("depth", depth, above=0)
        channels = scaled(STEM_CHANNELS, width)
        layers: list[nn.Module] = [*conv_norm_relu(input_shape[0], channels, 3)]
        for expansion, base, count, stride in STAGES:
            wider = scaled(base, width)
            for block in range(math.ceil(count * depth)):
                gate = SqueezeExcitation(wider)
                layers.append(InvertedResidual(channels, wider, expansion, stride if block == 0 else 1, gate))
                channels = wider
        super().__init__(layers, channels, num_classes)
