"""EfficientNet for small images (Tan & Le 2019, "EfficientNet: Rethinking Model Scaling")."""

from __future__ import annotations

import math

from torch import Tensor, nn

from ddpcore.models.blocks import PooledHead, SqueezeExcitation, conv_norm_relu, scaled
from ddpcore.models.mobilenet import InvertedResidual

INPUT_SHAPES: tuple[tuple[int, ...], ...] = ((3, 32, 32),)
NUM_CLASSES = 10
STEM_CHANNELS = 32
# Expansion, channels, blocks and stride of each stage, B0 of table 1.
STAGES = ((1, 16, 1, 2), (6, 24, 2, 1), (6, 40, 2, 2), (6, 80, 3, 2), (6, 112, 3, 1), (6, 192, 4, 2), (6, 320, 1, 2))


class EfficientNetB0(nn.Module):
    """A 3 x 3 convolution and sixteen inverted residuals, each with a gate on its output, pooled to a linear layer.

    Inputs [B, 3, 32, 32] to logits [B, C]. It is the lighter variant that results on CIFAR-10 are known for: depthwise
    convolutions are 3 x 3 throughout, gates act on a block's output with a reduction of 16, activations are ReLU, and
    the last 1 x 1 convolution of the paper's B0 is left out. Unlike kuangliu's pytorch-cifar, which adds the output
    without the gate to it, a block of stride 2 has the gated output alone, as in the paper. 2912089 parameters for 10
    classes.

    Args:
        width: multiplies the channels.
        depth: multiplies the blocks of each stage, rounded up.

    ValueError unless both are above 0.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...] = INPUT_SHAPES[0],
        num_classes: int = NUM_CLASSES,
        *,
        width: float = 1.0,
        depth: float = 1.0,
    ) -> None:
        super().__init__()
        if not depth > 0:
            raise ValueError(f"depth is {depth}, it must be above 0")
        channels = scaled(STEM_CHANNELS, width)
        layers: list[nn.Module] = [*conv_norm_relu(input_shape[0], channels, 3)]
        for expansion, base, count, stride in STAGES:
            wider = scaled(base, width)
            for block in range(math.ceil(count * depth)):
                gate = SqueezeExcitation(wider)
                layers.append(InvertedResidual(channels, wider, expansion, stride if block == 0 else 1, gate))
                channels = wider
        self.features = nn.Sequential(*layers)
        self.head = PooledHead(channels, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of a batch."""
        logits: Tensor = self.head(self.features(inputs))
        return logits
