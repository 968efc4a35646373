"""ResNeXt for small images (Xie et al. 2017, "Aggregated Residual Transformations for Deep Neural Networks")."""

from __future__ import annotations

from torch import Tensor, nn

from ddpcore.models.blocks import IMAGE, ImageChain, Shape, Sizes, conv_norm, conv_norm_relu, shortcut

STEM_CHANNELS = 64
EXPANSION = 4  # channels of a block's output over the channels of one group


class ResNeXt29(ImageChain):
    """Three stages of three bottleneck blocks with grouped 3 x 3 convolutions, 29 layers deep: 2 x 64d.

    Inputs [B, 3, 32, 32] to logits [B, C]. The stem is a 1 x 1 convolution; the paper's is 3 x 3. 9128778 parameters
    for 10 classes; the paper's 8 x 64d is cardinality=8. All numbers must be at least 1.

    Args:
        blocks: number of blocks of each stage; each stage after the first halves height and width and doubles channels.
        cardinality: number of groups of a grouped convolution.
        base_width: channels of a group in the first stage.
    """

    def __init__(
        self,
        input_shape: Shape = IMAGE,
        num_classes: int = 10,
        *,
        blocks: Sizes = (3, 3, 3),
        cardinality: int = 2,
        base_width: int = 64,
    ) -> None:
        if not blocks or min(*blocks, cardinality, base_width) < 1:
            raise ValueError(
                f"blocks {list(blocks)}, cardinality {cardinality} and base_width {base_width}: each must be at least 1"
            )
        layers: list[nn.Module] = [*conv_norm_relu(input_shape[0], STEM_CHANNELS)]
        channels = STEM_CHANNELS
        for stage, count in enumerate(blocks):
            group_width = base_width * 2**stage
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(GroupedBottleneck(channels, group_width, cardinality, stride))
                channels = EXPANSION * group_width
        super().__init__(layers, channels, num_classes)


class GroupedBottleneck(nn.Module):
    """1 x 1, grouped 3 x 3 and 1 x 1 convolutions with a shortcut."""

    def __init__(self, channels_in: int, group_width: int, groups: int, stride: int) -> None:
        super().__init__()
        width, channels_out = groups * group_width, EXPANSION * group_width
        self.residual = nn.Sequential(
            *conv_norm_relu(channels_in, width),
            *conv_norm_relu(width, width, 3, stride=stride, groups=groups),
            *conv_norm(width, channels_out),
        )
        self.shortcut = shortcut(channels_in, channels_out, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, channels_in, H, W] to [B, 4 group_width, H / stride, W / stride]."""
        outputs: Tensor = self.residual(inputs) + self.shortcut(inputs)
        return outputs.relu()
