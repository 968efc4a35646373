"""Fully connected networks: for images of digits, and for the ten features of the synthetic data set."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from torch import nn

from ddpcore.models.blocks import Chain, Shape


class MLP(Chain):
    """784-H1-...-C with ReLU; inputs [B, 1, 28, 28] or [B, 784] to logits [B, C]. Or 64-H1-...-C, for 8 x 8 pixels.

    `hidden` are the widths of the hidden layers, each at least 1. The default has 42310 parameters for 10 classes.
    """

    input_shapes = ((1, 28, 28), (784,), (1, 8, 8), (64,))
    num_classes = 10

    def __init__(
        self,
        input_shape: Shape = input_shapes[0],
        num_classes: int = num_classes,
        *,
        hidden: Sequence[int] | int = (50, 50),
    ) -> None:
        super().__init__()
        widths = (prod(input_shape), *((hidden,) if isinstance(hidden, int) else hidden))
        if min(widths) < 1:
            raise ValueError(f"hidden is {hidden}: each width must be at least 1")
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))


class SimpleNet(Chain):
    """10-50-C with ReLU; inputs [B, 10] to logits [B, C]. 652 parameters for 2 classes."""

    input_shapes = ((10,),)
    num_classes = 2

    def __init__(self, input_shape: Shape = input_shapes[0], num_classes: int = num_classes) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, num_classes))
