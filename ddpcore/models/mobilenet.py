"""MobileNets for small images: depthwise separable convolutions, and inverted residuals.

Howard et al. 2017, "MobileNets"; Sandler et al. 2018, "MobileNetV2: Inverted Residuals and Linear Bottlenecks".
"""

from __future__ import annotations

from torch import Tensor, nn

from ddpcore.models.blocks import IMAGE, ImageChain, Shape, conv_norm, conv_norm_relu, scaled, shortcut

STEM_CHANNELS = 32
# Channels and stride of each separable convolution.
SEPARABLE = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))
# Expansion, channels, blocks and stride of each stage: table 2 of the paper, with the first two strides of 1.
INVERTED = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
HEAD_CHANNELS = 1280


class MobileNet(ImageChain):
    """A 3 x 3 convolution, thirteen depthwise separable ones, mean pooling and a linear layer.

    Inputs [B, 3, 32, 32] to logits [B, C]; the stem has no stride. 3217226 parameters for 10 classes. ``width`` (above
    0) multiplies the channels, as in the paper.
    """

    def __init__(self, input_shape: Shape = IMAGE, num_classes: int = 10, *, width: float = 1.0) -> None:
        channels = scaled(STEM_CHANNELS, width)
        layers: list[nn.Module] = [*conv_norm_relu(input_shape[0], channels, 3)]
        for base, stride in SEPARABLE:
            layers += conv_norm_relu(channels, channels, 3, stride=stride, groups=channels)
            layers += conv_norm_relu(channels, scaled(base, width))
            channels = scaled(base, width)
        super().__init__(layers, channels, num_classes)


class MobileNetV2(ImageChain):
    """A 3 x 3 convolution, seventeen inverted residuals, a 1 x 1 convolution, mean pooling and a linear layer.

    Inputs [B, 3, 32, 32] to logits [B, C]. Three layers have a stride, instead of the paper's five, and ReLU replaces
    ReLU6. 2296922 parameters for 10 classes. ``width`` (above 0) multiplies the channels; as in the paper, it does not
    reduce the last convolution's.
    """

    def __init__(self, input_shape: Shape = IMAGE, num_classes: int = 10, *, width: float = 1.0) -> None:
        channels = scaled(STEM_CHANNELS, width)
        layers: list[nn.Module] = [*conv_norm_relu(input_shape[0], channels, 3)]
        for expansion, base, count, stride in INVERTED:
            for block in range(count):
                layers.append(InvertedResidual(channels, scaled(base, width), expansion, stride if block == 0 else 1))
                channels = scaled(base, width)
        head_channels = scaled(HEAD_CHANNELS, max(1.0, width))
        super().__init__([*layers, *conv_norm_relu(channels, head_channels)], head_channels, num_classes)


class InvertedResidual(nn.Module):
    """A 1 x 1 convolution that expands the channels, a 3 x 3 depthwise one, and a 1 x 1 one without a ReLU.

    With stride 1 the input is added, through a 1 x 1 convolution if the channels differ (the paper adds nothing then).

    Args:
        expansion: hidden channels, divided by the channels of the input.
        gate: applied to the output before the input is added.
    """

    def __init__(
        self, channels_in: int, channels_out: int, expansion: int, stride: int, gate: nn.Module | None = None
    ) -> None:
        super().__init__()
        hidden = expansion * channels_in
        self.residual = nn.Sequential(
            *conv_norm_relu(channels_in, hidden),
            *conv_norm_relu(hidden, hidden, 3, stride=stride, groups=hidden),
            *conv_norm(hidden, channels_out),
            *(() if gate is None else (gate,)),
        )
        self.shortcut = shortcut(channels_in, channels_out, 1) if stride == 1 else None

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, channels_in, H, W] to [B, channels_out, H / stride, W / stride]."""
        outputs: Tensor = self.residual(inputs)
        return outputs if self.shortcut is None else outputs + self.shortcut(inputs)
