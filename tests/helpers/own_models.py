"""Models and a schedule of a user for digits: wrong ones, and one with state that an additional pass would change."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Outputs(nn.Module):
    """Gives something else than ``[B, 10]``."""

    def __init__(self, kind: str = "right") -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.LazyLinear(10) if kind == "lazy" else nn.Linear(64, {"wide": 1000, "few": 5}.get(kind, 10))

    def forward(self, inputs: Tensor) -> Any:
        outputs = self.layer(inputs.flatten(1))
        if self.kind == "images":
            return outputs[:, :, None, None].expand(-1, -1, 8, 8)
        return {"logits": outputs} if self.kind == "dict" else outputs


class Counts(nn.Module):
    """It counts its passes in any mode, draws numbers, and keeps a part in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(64, 10), nn.BatchNorm1d(64).eval()
        self.register_buffer("passes", torch.zeros(()))
        self.is_begun = False

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes = self.passes + 1 + 0 * random.random() * torch.rand(())
        self.is_begun = True  # as of a layer that its first batch sets up
        return self.layer(self.norm(inputs.flatten(1)))


def no_rate(lr: float) -> Callable[[int], Any]:
    """A schedule that forgets to return the rate."""
    return lambda step: None
