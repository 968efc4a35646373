"""LeNet-5 (LeCun et al. 1998) with ReLU, max pooling, batch normalization and dropout."""

from __future__ import annotations

from torch import nn

from ddpcore.models.blocks import Chain, Shape, Sizes


class LeNet5(Chain):
    """Inputs [B, 1, 28, 28] or [B, 3, 32, 32] to logits [B, C].

    Convolutions are 5 x 5, each followed by batch normalization, ReLU and 2 x 2 max pooling. Dropout follows the first
    and the second fully connected layer. The defaults have 61750 parameters for 1 x 28 x 28 and 10 classes.

    Args:
        widths: of the two convolutions and of the first two fully connected layers; four numbers of at least 1.
        dropout: share of activations that are set to zero in training, in 0..1.
    """

    input_shapes = ((1, 28, 28), (3, 32, 32))
    num_classes = 10

    def __init__(
        self,
        input_shape: Shape = input_shapes[0],
        num_classes: int = num_classes,
        *,
        widths: Sizes = (6, 16, 120, 84),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if len(widths) != 4 or min(widths) < 1:
            raise ValueError(f"widths is {widths}: give four of at least 1, such as (6, 16, 120, 84)")
        filters, more_filters, wide, narrow = widths
        channels, height, _ = input_shape
        padding = (32 - height) // 2  # LeCun's input is 32 x 32: smaller images are padded
        self.features = nn.Sequential(*_block(channels, filters, padding), *_block(filters, more_filters, 0))
        self.classifier = nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(more_filters * 5 * 5, wide), nn.ReLU(), nn.Dropout(dropout)),
            *(nn.Linear(wide, narrow), nn.ReLU(), nn.Dropout(dropout)),
            nn.Linear(narrow, num_classes),
        )


def _block(channels_in: int, channels_out: int, padding: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels_in, channels_out, kernel_size=5, padding=padding)
    return convolution, nn.BatchNorm2d(channels_out), nn.ReLU(), nn.MaxPool2d(2)
