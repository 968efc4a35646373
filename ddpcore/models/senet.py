"""Squeeze-and-excitation networks for small images (Hu et al. 2018, "Squeeze-and-Excitation Networks")."""

from __future__ import annotations

from torch import Tensor, nn

from ddpcore.models.blocks import IMAGE, ImageChain, Shape, Sizes, SqueezeExcitation, conv_norm_relu
from ddpcore.models.resnet import check_stages


class SENet18(ImageChain):
    """ResNet-18 with pre-activation blocks, each with a squeeze-and-excitation gate on its residual branch.

    Inputs [B, 3, 32, 32] to logits [B, C]. 11260354 parameters for 10 classes.

    Args:
        blocks: number of blocks of each stage, at least 1.
        widths: channels of each stage, at least 1; as many numbers as blocks.
    """

    def __init__(
        self,
        input_shape: Shape = IMAGE,
        num_classes: int = 10,
        *,
        blocks: Sizes = (2, 2, 2, 2),
        widths: Sizes = (64, 128, 256, 512),
    ) -> None:
        check_stages(blocks, widths)
        channels = widths[0]
        layers: list[nn.Module] = [*conv_norm_relu(input_shape[0], channels, 3)]
        for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            for block in range(count):
                layers.append(PreActivationBlock(channels, width, stride=2 if stage > 0 and block == 0 else 1))
                channels = width
        super().__init__(layers, channels, num_classes)


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
            SqueezeExcitation(channels_out),
        )
        self.projection: nn.Module | None = None
        if stride != 1 or channels_in != channels_out:
            self.projection = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, channels_in, H, W] to [B, channels_out, H / stride, W / stride]."""
        active = self.activation(inputs)
        carried = inputs if self.projection is None else self.projection(active)
        outputs: Tensor = self.residual(active) + carried
        return outputs
