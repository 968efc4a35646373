"""Small convolutional networks: one layer for MNIST-sized images, two for CIFAR-sized ones."""

from __future__ import annotations

from torch import nn

from ddpcore.models.blocks import Chain, Shape


class MnistCNN(Chain):
    """A padded 3 x 3 convolution with 16 filters, ReLU and a linear layer; inputs [B, 1, 28, 28] to logits [B, C].

    125610 parameters for 10 classes, nearly all in the linear layer.
    """

    input_shapes = ((1, 28, 28),)
    num_classes = 10

    def __init__(self, input_shape: Shape = input_shapes[0], num_classes: int = num_classes) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * height * width, num_classes),
        )


class SimpleCNN(Chain):
    """3 x 3 convolutions with 4 and 8 filters, each with ReLU and 2 x 2 max pooling, 32 units and the logits.

    Inputs [B, 3, 32, 32] or [B, 1, 28, 28] to logits [B, C]. 17154 parameters for 3 x 32 x 32 and 10 classes; 9986 with
    padding=0, where each convolution removes a border of one pixel. ValueError unless padding is 0 or 1.
    """

    input_shapes = ((3, 32, 32), (1, 28, 28))
    num_classes = 10

    def __init__(
        self, input_shape: Shape = input_shapes[0], num_classes: int = num_classes, *, padding: int = 1
    ) -> None:
        super().__init__()
        if padding not in (0, 1):
            raise ValueError(f"padding is {padding}, it must be 0 or 1")
        channels, height, width = input_shape
        for _ in range(2):
            height, width = ((size - 2 + 2 * padding) // 2 for size in (height, width))
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, 4, kernel_size=3, padding=padding), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 8, kernel_size=3, padding=padding), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            *(nn.Linear(8 * height * width, 32), nn.ReLU()),
            nn.Linear(32, num_classes),
        )
