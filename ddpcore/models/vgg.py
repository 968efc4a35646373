"""VGG for small images (Simonyan & Zisserman 2015, "Very Deep Convolutional Networks"), with batch normalization."""

from __future__ import annotations

from torch import nn

from ddpcore.models.blocks import IMAGE, ImageChain, Shape, conv_norm_relu, scaled

STAGES = ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))  # convolutions and channels: configuration E of table 1


class VGG19(ImageChain):
    """Sixteen 3 x 3 convolutions in five stages, each ending with 2 x 2 max pooling, and one linear layer.

    Inputs [B, 3, 32, 32] to logits [B, C]. One linear layer replaces the paper's three: an image of 32 x 32 is one
    pixel after five poolings. 20040522 parameters for 10 classes. ``width`` (above 0) multiplies the channels.
    """

    def __init__(self, input_shape: Shape = IMAGE, num_classes: int = 10, *, width: float = 1.0) -> None:
        layers: list[nn.Module] = []
        channels = input_shape[0]
        for num_convolutions, base in STAGES:
            for _ in range(num_convolutions):
                layers += conv_norm_relu(channels, scaled(base, width), 3, bias=True)
                channels = scaled(base, width)
            layers.append(nn.MaxPool2d(2))
        super().__init__(layers, channels, num_classes)
