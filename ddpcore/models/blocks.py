"""Layers that several models share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ddpcore.options.typed import check_range

Shape = tuple[int, ...]
Sizes = Sequence[int]
IMAGE = (3, 32, 32)


class Chain(nn.Module):
    """Applies its submodules one after the other, in the order in which they were assigned."""

    vectorizes = True

    def forward(self, inputs: Tensor) -> Tensor:
        """A batch ``[B, ...]`` to the output of the last submodule, the logits ``[B, num_classes]`` of a model."""
        for module in self.children():
            inputs = module(inputs)
        return inputs


def conv_norm(
    channels_in: int, channels_out: int, kernel_size: int = 1, *, stride: int = 1, groups: int = 1, bias: bool = False
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """A convolution with padding (height and width change only by the stride) and its batch normalization.

    The normalization subtracts the mean, so a bias has no effect; it is kept where the published network has one.
    """
    convolution = nn.Conv2d(
        channels_in, channels_out, kernel_size, stride=stride, padding=kernel_size // 2, groups=groups, bias=bias
    )
    return convolution, nn.BatchNorm2d(channels_out)


def conv_norm_relu(
    channels_in: int, channels_out: int, kernel_size: int = 1, *, stride: int = 1, groups: int = 1, bias: bool = False
) -> tuple[nn.Module, ...]:
    """:func:`conv_norm` and a ReLU."""
    return *conv_norm(channels_in, channels_out, kernel_size, stride=stride, groups=groups, bias=bias), nn.ReLU()


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
        gates: Tensor = self.gate(inputs.mean(dim=(2, 3)))
        return inputs * gates[:, :, None, None]


class PooledHead(nn.Module):
    """Global average pooling and a linear layer."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, channels, H, W] to logits [B, num_classes]."""
        logits: Tensor = self.linear(inputs.mean(dim=(2, 3)))
        return logits


class ImageChain(Chain):
    """Layers for images of 32 x 32 pixels, whose output has so many channels, then pooling and a linear layer."""

    input_shapes = (IMAGE,)
    num_classes = 10

    def __init__(self, layers: Iterable[nn.Module], channels: int, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*layers)
        self.head = PooledHead(channels, num_classes)


class Block(nn.Module):
    """Attention, then two linear layers with a GELU between them; each has a norm before it and a residual sum.

    Args:
        width: of a token.
        num_heads: of attention.
        mlp_width: hidden units of the two linear layers.
        dropout: share of the outputs of attention, hidden and last layer that are set to zero in training.
        drop_path: share of samples that skip the branches in training.
        causal: a token attends only to itself and to the tokens before it.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        mlp_width: int,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        *,
        causal: bool = False,
    ) -> None:
        super().__init__()
        attention = SelfAttention(width, num_heads, causal=causal)
        self.attention = nn.Sequential(nn.LayerNorm(width), attention, nn.Dropout(dropout))
        self.mlp = nn.Sequential(
            *(nn.LayerNorm(width), nn.Linear(width, mlp_width), nn.GELU(), nn.Dropout(dropout)),
            *(nn.Linear(mlp_width, width), nn.Dropout(dropout)),
        )
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, tokens, width] to the same shape."""
        tokens = tokens + self.drop_path(self.attention(tokens))
        outputs: Tensor = tokens + self.drop_path(self.mlp(tokens))
        return outputs


class SelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017); ``causal`` masks the tokens after each token."""

    def __init__(self, width: int, num_heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, tokens, width] to the same shape."""
        heads = self.query_key_value(tokens).unflatten(-1, (3, self.num_heads, -1))  # [B, tokens, 3, heads, head width]
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        outputs: Tensor = self.project(attended.transpose(1, 2).flatten(2))
        return outputs


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): in training some samples become zeros, the others are scaled up."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, branch: Tensor) -> Tensor:
        """[B, ...] to the same shape, with the same expectation."""
        if self.share == 0 or not self.training:
            return branch
        kept = F.dropout(branch.new_ones(len(branch), *[1] * (branch.ndim - 1)), self.share)
        return branch * kept
