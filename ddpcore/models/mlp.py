"""A fully connected network for MNIST."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from ddpcore.models.blocks import Chain

INPUT_SHAPES: tuple[tuple[int, ...], ...] = ((1, 28, 28), (784,))
NUM_CLASSES = 10


class MLP(Chain):
    """784-H1-...-C with ReLU; inputs [B, 1, 28, 28] or [B, 784] to logits [B, C].

    `hidden` are the widths of the hidden layers, each at least 1. The default has 42310 parameters for 10 classes.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...] = INPUT_SHAPES[0],
        num_classes: int = NUM_CLASSES,
        *,
        hidden: Sequence[int] | int = (50, 50),
    ) -> None:
        super().__init__()
        widths = (784, *((hidden,) if isinstance(hidden, int) else hidden))
        if min(widths) < 1:
            raise ValueError(f"hidden is {hidden}: each width must be at least 1")
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))
