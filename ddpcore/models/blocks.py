"""What the convolutional networks are made of."""

from __future__ import annotations

from torch import Tensor, nn


def conv_norm(
    channels_in: int, channels_out: int, kernel_size: int = 1, *, stride: int = 1, groups: int = 1, bias: bool = False
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """A convolution that keeps height and width, but for the stride, and its batch normalization.

    The norm takes the mean away, and the bias with it: networks that were published with one keep it here, idle.
    """
    convolution = nn.Conv2d(
        channels_in, channels_out, kernel_size, stride=stride, padding=kernel_size // 2, groups=groups, bias=bias
    )
    return convolution, nn.BatchNorm2d(channels_out)


def conv_norm_relu(
    channels_in: int, channels_out: int, kernel_size: int = 1, *, stride: int = 1, groups: int = 1, bias: bool = False
) -> tuple[nn.Module, ...]:
    """The same and a ReLU."""
    return *conv_norm(channels_in, channels_out, kernel_size, stride=stride, groups=groups, bias=bias), nn.ReLU()


def shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    """Nothing where shapes agree, else a 1 x 1 convolution and its norm that make them agree."""
    if stride == 1 and channels_in == channels_out:
        return nn.Identity()
    return nn.Sequential(*conv_norm(channels_in, channels_out, stride=stride))


def scaled(channels: int, width: float) -> int:
    """Channels times a width multiplier, rounded, at least 1. ValueError unless the multiplier is above 0."""
    if not width > 0:
        raise ValueError(f"width is {width}, it must be above 0")
    return max(1, round(channels * width))


class SqueezeExcitation(nn.Module):
    """Each channel times a gate in 0..1 that two layers find in the channels' means (Hu et al. 2018, section 3)."""

    def __init__(self, channels: int, reduction: int = 16) -> None:
        super().__init__()
        hidden = max(1, channels // reduction)
        self.gate = nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, channels), nn.Sigmoid())

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, channels, H, W] to the same."""
        gates: Tensor = self.gate(inputs.mean(dim=(2, 3)))
        return inputs * gates[:, :, None, None]


class PooledHead(nn.Module):
    """The mean over height and width, and a linear layer."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, channels, H, W] to logits [B, num_classes]."""
        logits: Tensor = self.linear(inputs.mean(dim=(2, 3)))
        return logits
