"""Residual networks for small images: ResNet, ResNeXt and SENet.

He et al. 2016, "Deep Residual Learning for Image Recognition"; Xie et al. 2017, "Aggregated Residual Transformations
for Deep Neural Networks"; Hu et al. 2018, "Squeeze-and-Excitation Networks".
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from torch import Tensor, nn

from ddpcore.models import blocks as parts
from ddpcore.models.blocks import ImageChain, Shape, Sizes, conv_norm, conv_norm_relu


class ResNet(nn.Sequential):
    """A 3 x 3 convolution, stages of basic blocks, global average pooling and a linear layer.

    Inputs [B, channels, H, W] to logits [B, C]. Images are small, so the stem has no stride and no pooling. ``blocks``
    and ``widths`` are the numbers of blocks and channels of each stage. Each after the first halves height and width.
    """

    input_shapes = ((3, 32, 32), (1, 28, 28))
    num_classes = 10

    def __init__(
        self, input_shape: Shape, num_classes: int, *, blocks: Sizes = (1, 1, 1, 1), widths: Sizes = (16, 32, 64, 128)
    ) -> None:
        super().__init__()
        check_stages(blocks, widths)
        self.stem = nn.Sequential(*conv_norm_relu(input_shape[0], widths[0], 3))
        self.blocks = nn.Sequential(*stages(BasicBlock, widths[0], blocks, widths))
        self.pool, self.flatten = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.head = nn.Linear(widths[-1], num_classes)


class ResNet18(ResNet):
    """Two blocks in each of four stages of 64 to 512 channels."""

    def __init__(self, input_shape: Shape, num_classes: int) -> None:
        super().__init__(input_shape, num_classes, blocks=(2, 2, 2, 2), widths=(64, 128, 256, 512))


class Residual(nn.Module):
    """The ReLU of the sum of some layers and a shortcut: the identity, or a 1 x 1 convolution if shapes differ."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.residual = nn.Sequential(*layers)
        self.shortcut = parts.shortcut(channels_in, channels_out, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, channels_in, H, W] to [B, channels_out, H / stride, W / stride]."""
        return (self.residual(inputs) + self.shortcut(inputs)).relu()


class BasicBlock(Residual):
    """Two 3 x 3 convolutions."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        layers = *conv_norm_relu(channels_in, channels_out, 3, stride=stride), *conv_norm(channels_out, channels_out, 3)
        super().__init__(channels_in, channels_out, stride, layers)


def check_stages(blocks: Sequence[int], widths: Sequence[int]) -> None:
    """ValueError unless there is a stage, and a number of blocks and of channels for each, all at least 1."""
    if not blocks or len(blocks) != len(widths) or min(*blocks, *widths) < 1:
        raise ValueError(f"blocks {list(blocks)} and widths {list(widths)} must be as many, each at least 1")


RESNEXT_STEM = 64
RESNEXT_EXPANSION = 4  # channels of a block's output over the channels of one group


class ResNeXt29(ImageChain):
    """Three stages of three bottleneck blocks with grouped 3 x 3 convolutions, 29 layers deep: 2 x 64d.

    Inputs [B, 3, 32, 32] to logits [B, C]. The stem is a 1 x 1 convolution; the paper's is 3 x 3. ``blocks`` is the
    number of blocks of each stage. Each after the first halves height and width and doubles the channels. A grouped
    convolution has ``cardinality`` groups (8 in the paper's 8 x 64d), of ``base_width`` channels in the first stage.
    """

    def __init__(
        self,
        input_shape: Shape,
        num_classes: int,
        *,
        blocks: Sizes = (3, 3, 3),
        cardinality: int = 2,
        base_width: int = 64,
    ) -> None:
        if not blocks or min(*blocks, cardinality, base_width) < 1:
            given = f"blocks {list(blocks)}, cardinality {cardinality} and base_width {base_width}"
            raise ValueError(f"{given}: each must be at least 1")
        widths = [RESNEXT_EXPANSION * base_width * 2**stage for stage in range(len(blocks))]
        layers = stages(partial(GroupedBottleneck, groups=cardinality), RESNEXT_STEM, blocks, widths)
        super().__init__([*conv_norm_relu(input_shape[0], RESNEXT_STEM), *layers], widths[-1], num_classes)


class GroupedBottleneck(Residual):
    """1 x 1, grouped 3 x 3 and 1 x 1 convolutions."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, groups: int) -> None:
        width = groups * channels_out // RESNEXT_EXPANSION
        layers = (
            *conv_norm_relu(channels_in, width),
            *conv_norm_relu(width, width, 3, stride=stride, groups=groups),
            *conv_norm(width, channels_out),
        )
        super().__init__(channels_in, channels_out, stride, layers)


class SENet18(ImageChain):
    """ResNet-18 with pre-activation blocks, each with a squeeze-and-excitation gate on its residual branch.

    Inputs [B, 3, 32, 32] to logits [B, C]. ``blocks`` and ``widths`` are as in :class:`ResNet`.
    """

    def __init__(
        self, input_shape: Shape, num_classes: int, *, blocks: Sizes = (2, 2, 2, 2), widths: Sizes = (64, 128, 256, 512)
    ) -> None:
        check_stages(blocks, widths)
        stem = conv_norm_relu(input_shape[0], widths[0], 3)
        super().__init__([*stem, *stages(PreActivationBlock, widths[0], blocks, widths)], widths[-1], num_classes)


class PreActivationBlock(nn.Module):
    """Twice norm, ReLU and 3 x 3 convolution, gated and added to the input (He et al. 2016, "Identity Mappings").

    If shapes differ, a 1 x 1 convolution of the activated input is added instead of the input.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.activation = nn.Sequential(nn.BatchNorm2d(channels_in), nn.ReLU())
        self.residual = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False),
            *(nn.BatchNorm2d(channels_out), nn.ReLU()),
            nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
            parts.SqueezeExcitation(channels_out),
        )
        differs = stride != 1 or channels_in != channels_out
        self.projection = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False) if differs else None

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, channels_in, H, W] to [B, channels_out, H / stride, W / stride]."""
        active = self.activation(inputs)
        return self.residual(active) + (inputs if self.projection is None else self.projection(active))


def stages(
    make: Callable[[int, int, int], nn.Module], channels: int, blocks: Sizes, widths: Sizes
) -> Iterator[nn.Module]:
    """The blocks ``make(channels in, channels out, stride)`` of all stages. Each after the first halves the image."""
    for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
        for block in range(count):
            yield make(channels, width, 2 if stage > 0 and block == 0 else 1)
            channels = width
