"""Layers that several models share."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ddpcore.options.typed import check_range

Shape = tuple[int, ...]
Sizes = Sequence[int]


def conv_norm(
    channels_in: int, channels_out: int, kernel_size: int = 1, *, stride: int = 1, groups: int = 1, bias: bool = False
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """A convolution with padding (height and width change only by the stride) and its batch normalization.

    The normalization subtracts the mean, so a bias has no effect; it is kept where the published network has one.
    """
    padding = kernel_size // 2
    convolution = nn.Conv2d(channels_in, channels_out, kernel_size, stride, padding, groups=groups, bias=bias)
    return convolution, nn.BatchNorm2d(channels_out)


def conv_norm_relu(*sizes: int, **options: Any) -> tuple[nn.Module, ...]:
    """:func:`conv_norm` of the same arguments and a ReLU."""
    return *conv_norm(*sizes, **options), nn.ReLU()


def shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    """The identity if shapes agree, else a 1 x 1 convolution with batch normalization that changes the shape."""
    if stride == 1 and channels_in == channels_out:
        return nn.Identity()
    return nn.Sequential(*conv_norm(channels_in, channels_out, stride=stride))


def scaled(channels: int, width: float) -> int:
    """Channels times a width multiplier (above 0), rounded, at least 1."""
    check_range("width", width, above=0)
    return max(1, round(channels * width))


class SqueezeExcitation(nn.Module):
    """Multiplies each channel by a gate in 0..1 (Hu et al. 2018, section 3).

    Two layers compute the gates from the channels' means.
    """

    def __init__(self, channels: int, reduction: int = 16) -> None:
        super().__init__()
        hidden = max(1, channels // reduction)
        self.gate = nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, channels), nn.Sigmoid())

    def forward(self, inputs: Tensor) -> Tensor:
        """``[B, channels, H, W]`` to the same shape."""
        return inputs * self.gate(inputs.mean(dim=(2, 3)))[:, :, None, None]


class PooledHead(nn.Sequential):
    """Global average pooling and a linear layer: [B, channels, H, W] to logits [B, num_classes]."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.pool, self.flatten = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.linear = nn.Linear(channels, num_classes)


class ImageChain(nn.Sequential):
    """Layers for images of 32 x 32 pixels, whose output has so many channels, then pooling and a linear layer."""

    input_shapes = ((3, 32, 32),)
    num_classes = 10

    def __init__(self, layers: Iterable[nn.Module], channels: int, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*layers)
        self.head = PooledHead(channels, num_classes)
