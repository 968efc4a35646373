"""A network with one hidden layer, for the ten features of the synthetic data set."""

from __future__ import annotations

from torch import nn

from ddpcore.models.blocks import Chain


class SimpleNet(Chain):
    """10-50-C with ReLU; inputs [B, 10] to logits [B, C]. 652 parameters for 2 classes."""

    input_shapes = ((10,),)
    num_classes = 2

    def __init__(self, input_shape: tuple[int, ...] = input_shapes[0], num_classes: int = num_classes) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, num_classes))
