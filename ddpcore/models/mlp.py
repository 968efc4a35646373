"""The fully connected network on which SSGD and DPSGD are compared on MNIST."""

from __future__ import annotations

from torch import Tensor, nn

INPUT_SHAPES: tuple[tuple[int, ...], ...] = ((1, 28, 28), (784,))
NUM_CLASSES = 10


class MLP(nn.Module):
    """784-50-50-C with ReLU; inputs [B, 1, 28, 28] or [B, 784] to logits [B, C]. 42310 parameters for 10 classes."""

    def __init__(self, input_shape: tuple[int, ...] = INPUT_SHAPES[0], num_classes: int = NUM_CLASSES) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, num_classes)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of a batch."""
        logits: Tensor = self.layers(inputs)
        return logits
