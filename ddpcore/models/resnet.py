"""Residual networks for small images (He et al. 2016, "Deep Residual Learning for Image Recognition")."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ddpcore.models.blocks import Shape, Sizes, conv_norm, conv_norm_relu, shortcut


class ResNet(nn.Module):
    """A 3 x 3 convolution, stages of basic blocks, global average pooling and a linear layer.

    Images are small, so the stem has no stride and no pooling. Each stage after the first halves height and width.
    Inputs [B, channels, H, W] to logits [B, C]. The defaults have 308826 parameters for 3 x 32 x 32 and 10 classes.

    Args:
        blocks: number of blocks of each stage, at least 1.
        widths: channels of each stage, at least 1; as many numbers as blocks.
    """

    input_shapes = ((3, 32, 32), (1, 28, 28))
    num_classes = 10

    def __init__(
        self,
        input_shape: Shape = input_shapes[0],
        num_classes: int = num_classes,
        *,
        blocks: Sizes = (1, 1, 1, 1),
        widths: Sizes = (16, 32, 64, 128),
    ) -> None:
        super().__init__()
        check_stages(blocks, widths)
        self.stem = nn.Sequential(*conv_norm_relu(input_shape[0], widths[0], 3))
        stages: list[nn.Module] = []
        channels = widths[0]
        for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            for block in range(count):
                stages.append(BasicBlock(channels, width, stride=2 if stage > 0 and block == 0 else 1))
                channels = width
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of a batch."""
        features = self.blocks(self.stem(inputs))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


class ResNet18(ResNet):
    """Two blocks in each of four stages of 64 to 512 channels: 11173962 parameters for 3 x 32 x 32 and 10 classes."""

    input_shapes = ((3, 32, 32), (1, 28, 28))
    num_classes = 10

    def __init__(self, input_shape: Shape = input_shapes[0], num_classes: int = num_classes) -> None:
        super().__init__(input_shape, num_classes, blocks=(2, 2, 2, 2), widths=(64, 128, 256, 512))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut: the identity, or a 1 x 1 convolution if shapes differ."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *conv_norm_relu(channels_in, channels_out, 3, stride=stride),
            *conv_norm(channels_out, channels_out, 3),
        )
        self.shortcut = shortcut(channels_in, channels_out, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, channels_in, H, W] to [B, channels_out, H / stride, W / stride]."""
        outputs: Tensor = self.residual(inputs) + self.shortcut(inputs)
        return outputs.relu()


def check_stages(blocks: Sequence[int], widths: Sequence[int]) -> None:
    """ValueError unless there is a stage, and a number of blocks and of channels for each, all at least 1."""
    if not blocks or len(blocks) != len(widths) or min(*blocks, *widths) < 1:
        raise ValueError(f"blocks {list(blocks)} and widths {list(widths)} must be as many, each at least 1")
