"""Small networks: fully connected, convolutional and recurrent, and a loss with a known saddle."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcore.models.blocks import Shape, Sizes
from ddpcore.options.typed import check_range


class MLP(nn.Sequential):
    """784-H1-...-C with ReLU; inputs [B, 1, 28, 28] or [B, 784] to logits [B, C]. Or 64-H1-...-C, for 8 x 8 pixels.

    `hidden` are the widths of the hidden layers, each at least 1.
    """

    input_shapes = ((1, 28, 28), (784,), (1, 8, 8), (64,))
    num_classes = 10

    def __init__(self, input_shape: Shape, num_classes: int, *, hidden: Sequence[int] | int = (50, 50)) -> None:
        super().__init__()
        widths = (prod(input_shape), *((hidden,) if isinstance(hidden, int) else hidden))
        if min(widths) < 1:
            raise ValueError(f"hidden is {hidden}: each width must be at least 1")
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))


class SimpleNet(nn.Sequential):
    """10-50-C with ReLU; inputs [B, 10] to logits [B, C]."""

    input_shapes = ((10,),)
    num_classes = 2

    def __init__(self, input_shape: Shape, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, num_classes))


class MnistCNN(nn.Sequential):
    """A padded 3 x 3 convolution with 16 filters, ReLU and a linear layer; inputs [B, 1, 28, 28] to logits [B, C]."""

    input_shapes = ((1, 28, 28),)
    num_classes = 10

    def __init__(self, input_shape: Shape, num_classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        convolution = nn.Conv2d(channels, 16, kernel_size=3, padding=1)
        self.layers = nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), nn.Linear(16 * height * width, num_classes))


class SimpleCNN(nn.Sequential):
    """3 x 3 convolutions with 4 and 8 filters, each with ReLU and 2 x 2 max pooling, 32 units and the logits.

    Inputs [B, 3, 32, 32] or [B, 1, 28, 28] to logits [B, C]. With padding=0 each convolution removes a border of one
    pixel. ValueError unless padding is 0 or 1.
    """

    input_shapes = ((3, 32, 32), (1, 28, 28))
    num_classes = 10

    def __init__(self, input_shape: Shape, num_classes: int, *, padding: int = 1) -> None:
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


class LeNet5(nn.Sequential):
    """Inputs [B, 1, 28, 28] or [B, 3, 32, 32] to logits [B, C].

    Convolutions are 5 x 5, each followed by batch normalization, ReLU and 2 x 2 max pooling. Dropout follows the first
    and the second fully connected layer. ``widths`` has the widths of the two convolutions and of these two layers.
    """

    input_shapes = ((1, 28, 28), (3, 32, 32))
    num_classes = 10

    def __init__(
        self, input_shape: Shape, num_classes: int, *, widths: Sizes = (6, 16, 120, 84), dropout: float = 0.5
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


class Saddle(nn.Module):
    """Logits z of class 1 and 0 of all others, ``z = 1/2 escape e^2 + (p + e q).s``; inputs [B, 2 S] hold p and q.

    The 1 + S parameters, e and s, are initialized as normal with standard deviation `radius`. With two classes and
    label 1 the loss of a sample is ``log(1 + exp(-z))``, which is ln 2 at zero weights. If p and q have mean zero over
    the samples, as in the data set `saddle`, zero is a strict saddle of the mean loss: its Hessian is ``-escape / 2``
    along e and ``mean(p p^T) / 4`` along s, and zero between them. Each sample's own Hessian has ``-q / 2`` there.

    ValueError if the number of inputs is odd, escape is not above 0, or radius is below 0.
    """

    input_shapes = ((2,),)
    num_classes = 2
    any_size = True
    vectorizes = True

    def __init__(self, input_shape: Shape, num_classes: int, *, escape: float = 0.1, radius: float = 1e-8) -> None:
        super().__init__()
        if input_shape[0] % 2:
            raise ValueError(f"samples of {input_shape[0]} numbers are no p and q of one length: take an even number")
        check_range("escape", escape, above=0)
        check_range("radius", radius, least=0)
        self.escape, self.num_classes = escape, num_classes
        self.e = nn.Parameter(radius * torch.randn(1))
        self.s = nn.Parameter(radius * torch.randn(input_shape[0] // 2))

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of a batch."""
        p, q = inputs.chunk(2, dim=-1)
        z = 0.5 * self.escape * self.e.square() + (p + self.e * q) @ self.s
        return F.pad(z[..., None], (1, self.num_classes - 2))


class SpeechLSTM(nn.Module):
    """Stacked bidirectional LSTM layers, a linear bottleneck, and the classes of the middle frame.

    Inputs [B, frames, features] of any size to logits [B, C]. The defaults are the published acoustic model: 21 frames
    of 260 features, 6 layers (``depth``) of 512 cells in each direction (``width``), a bottleneck of 256 units and
    32000 states of hidden Markov models. Its 43154944 parameters are the 164.62 MB of the large-batch study.

    The acoustic model classifies all frames of a sequence; here a sample has one label, the label of frame frames // 2.
    """

    input_shapes = ((21, 260),)
    num_classes = 32000
    any_size = True

    def __init__(
        self, input_shape: Shape, num_classes: int, *, depth: int = 6, width: int = 512, bottleneck: int = 256
    ) -> None:
        super().__init__()
        if min(depth, width, bottleneck) < 1:
            raise ValueError(f"depth {depth}, width {width} and bottleneck {bottleneck}: each must be at least 1")
        self.lstm = nn.LSTM(input_shape[1], width, num_layers=depth, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(2 * width, bottleneck), nn.Linear(bottleneck, num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of a batch."""
        frames, _ = self.lstm(inputs)
        return self.head(frames[:, inputs.shape[1] // 2])
