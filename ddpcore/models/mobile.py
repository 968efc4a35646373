"""Networks of depthwise convolutions for small images: MobileNet, EfficientNet and ShuffleNet.

Howard et al. 2017, "MobileNets"; Sandler et al. 2018, "MobileNetV2: Inverted Residuals and Linear Bottlenecks"; Tan &
Le 2019, "EfficientNet: Rethinking Model Scaling"; Ma et al. 2018, "ShuffleNet V2: Practical Guidelines".
"""

import math

import torch
from torch import Tensor, nn

from ddpcore.models import blocks as parts
from ddpcore.models.blocks import ImageChain, Shape, Sizes, conv_norm, conv_norm_relu, scaled
from ddpcore.models.residual import check_stages
from ddpcore.options.typed import check_range

STEM_CHANNELS = 32
# Channels and stride of each separable convolution.
SEPARABLE = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))
# Expansion, channels, blocks and stride of each stage: table 2 of the paper, with the first two strides of 1.
INVERTED = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
HEAD_CHANNELS = 1280


class MobileNet(ImageChain):
    """A 3 x 3 convolution, thirteen depthwise separable ones, mean pooling and a linear layer.

    Inputs [B, 3, 32, 32] to logits [B, C]; the stem has no stride. ``width`` (above 0) multiplies the channels.
    """

    def __init__(self, input_shape: Shape, num_classes: int, *, width: float = 1.0) -> None:
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
    ReLU6. ``width`` (above 0) multiplies the channels; as in the paper, it does not reduce the last convolution's.
    """

    def __init__(self, input_shape: Shape, num_classes: int, *, width: float = 1.0) -> None:
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
    There are ``expansion`` times as many hidden channels as input channels. A ``gate`` acts before the input is added.
    """

    def __init__(self, channels_in: int, channels_out: int, expansion: int, stride: int, *gate: nn.Module) -> None:
        super().__init__()
        hidden = expansion * channels_in
        self.residual = nn.Sequential(
            *conv_norm_relu(channels_in, hidden),
            *conv_norm_relu(hidden, hidden, 3, stride=stride, groups=hidden),
            *conv_norm(hidden, channels_out),
            *gate,
        )
        self.shortcut = parts.shortcut(channels_in, channels_out, 1) if stride == 1 else None

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, channels_in, H, W] to [B, channels_out, H / stride, W / stride]."""
        outputs: Tensor = self.residual(inputs)
        return outputs if self.shortcut is None else outputs + self.shortcut(inputs)


# Expansion, channels, blocks and stride of each stage, B0 of table 1.
EFFICIENT = ((1, 16, 1, 2), (6, 24, 2, 1), (6, 40, 2, 2), (6, 80, 3, 2), (6, 112, 3, 1), (6, 192, 4, 2), (6, 320, 1, 2))


class EfficientNetB0(ImageChain):
    """A 3 x 3 convolution, sixteen inverted residuals with a gate on their output, mean pooling and a linear layer.

    Inputs [B, 3, 32, 32] to logits [B, C]. This is the lighter variant that is common for CIFAR-10: all depthwise
    convolutions are 3 x 3, gates act on a block's output (reduction 16), activations ReLU; no last 1 x 1 convolution.

    Args:
        width: multiplies the channels, above 0.
        depth: multiplies the blocks of each stage (rounded up), above 0.
        add_ungated: whether a block of stride 2 adds its output without the gate to the gated one, as in kuangliu's
            pytorch-cifar; else it returns the gated one alone, as in the paper.
    """

    def __init__(
        self, input_shape: Shape, num_classes: int, *, width: float = 1.0, depth: float = 1.0, add_ungated: bool = True
    ) -> None:
        check_range("depth", depth, above=0)
        channels = scaled(STEM_CHANNELS, width)
        layers: list[nn.Module] = [*conv_norm_relu(input_shape[0], channels, 3)]
        for expansion, base, count, stride in EFFICIENT:
            wider = scaled(base, width)
            for block in range(math.ceil(count * depth)):
                step = stride if block == 0 else 1
                gate = (_GatePlusOne if add_ungated and step == 2 else parts.SqueezeExcitation)(wider)
                layers.append(InvertedResidual(channels, wider, expansion, step, gate))
                channels = wider
        super().__init__(layers, channels, num_classes)


class _GatePlusOne(parts.SqueezeExcitation):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + inputs


SHUFFLE_STEM = 24


class ShuffleNet(ImageChain):
    """ShuffleNet V2 1x: three stages of units that transform half of the channels and shuffle all of them.

    Inputs [B, 3, 32, 32] to logits [B, C]; the stem has no stride and no pooling. ``blocks`` and ``widths`` are the
    numbers of units and of channels (even) of each stage, whose first unit halves height and width. The paper's 0.5x
    has the widths (48, 96, 192). The last convolution has ``head_width`` channels.
    """

    def __init__(
        self,
        input_shape: Shape,
        num_classes: int,
        *,
        blocks: Sizes = (4, 8, 4),
        widths: Sizes = (116, 232, 464),
        head_width: int = 1024,
    ) -> None:
        check_stages(blocks, widths)
        if any(width % 2 for width in widths):
            raise ValueError(f"widths is {list(widths)}, each must be even: units split the channels into halves")
        check_range("head_width", head_width, least=1)
        layers: list[nn.Module] = [*conv_norm_relu(input_shape[0], SHUFFLE_STEM, 3)]
        channels = SHUFFLE_STEM
        for count, width in zip(blocks, widths, strict=True):
            layers.append(DownUnit(channels, width))
            layers += [Unit(width) for _ in range(count - 1)]
            channels = width
        super().__init__([*layers, *conv_norm_relu(channels, head_width)], head_width, num_classes)


class Unit(nn.Module):
    """Three convolutions transform half of the channels; then both halves are shuffled."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = _separable(channels // 2, channels // 2, stride=1)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, channels, H, W] to the same shape."""
        kept, changed = inputs.chunk(2, dim=1)
        return shuffle(kept, self.branch(changed))


class DownUnit(nn.Module):
    """Two branches of stride 2 read all channels; each gives half of the output's channels, which are shuffled."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        half = channels_out // 2
        halved = conv_norm(channels_in, channels_in, 3, stride=2, groups=channels_in)
        self.short = nn.Sequential(*halved, *conv_norm_relu(channels_in, half))
        self.branch = _separable(channels_in, half, stride=2)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, channels_in, H, W] to [B, channels_out, H / 2, W / 2]."""
        return shuffle(self.short(inputs), self.branch(inputs))


def _separable(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        *conv_norm_relu(channels_in, channels_out),
        *conv_norm(channels_out, channels_out, 3, stride=stride, groups=channels_out),
        *conv_norm_relu(channels_out, channels_out),
    )


def shuffle(one: Tensor, other: Tensor) -> Tensor:
    """Two tensors [B, channels, H, W] to [B, 2 channels, H, W] with alternating channels: one, other, one, other ..."""
    return torch.stack([one, other], dim=2).flatten(1, 2)
