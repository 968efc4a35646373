"""ShuffleNet V2 for small images (Ma et al. 2018, "ShuffleNet V2: Practical Guidelines")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddpcore.models.blocks import IMAGE, ImageChain, Shape, Sizes, conv_norm, conv_norm_relu
from ddpcore.models.resnet import check_stages
from ddpcore.options.typed import check_range

STEM_CHANNELS = 24


class ShuffleNet(ImageChain):
    """ShuffleNet V2 1x: three stages of units that transform half of the channels and shuffle all of them.

    Inputs [B, 3, 32, 32] to logits [B, C]; the stem has no stride and no pooling. 1263854 parameters for 10 classes.

    Args:
        blocks: number of units of each stage, at least 1; the first unit halves height and width.
        widths: channels of each stage, even; as many numbers as blocks. The paper's 0.5x is (48, 96, 192).
        head_width: channels of the last convolution, at least 1.
    """

    def __init__(
        self,
        input_shape: Shape = IMAGE,
        num_classes: int = 10,
        *,
        blocks: Sizes = (4, 8, 4),
        widths: Sizes = (116, 232, 464),
        head_width: int = 1024,
    ) -> None:
        check_stages(blocks, widths)
        if any(width % 2 for width in widths):
            raise ValueError(f"widths is {list(widths)}, each must be even: units split the channels into halves")
        check_range("head_width", head_width, least=1)
        layers: list[nn.Module] = [*conv_norm_relu(input_shape[0], STEM_CHANNELS, 3)]
        channels = STEM_CHANNELS
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
        self.short = nn.Sequential(
            *conv_norm(channels_in, channels_in, 3, stride=2, groups=channels_in), *conv_norm_relu(channels_in, half)
        )
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
