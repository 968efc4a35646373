"""Models of virtual learners without a strategy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddpcore.parameters.copies import copies_of
from ddpcore.parameters.flat import FlatParameters
from ddpcore.parameters.learner_models import LearnerModels


def learners(model: nn.Module, n: int, vectorize: Any) -> LearnerModels:
    """Models with different weights."""
    models = copies_of(model, n)
    flat = FlatParameters([one.named_parameters() for one in models])
    with torch.no_grad():
        flat.param_LP.add_(0.1 * torch.randn(flat.param_LP.shape, generator=torch.Generator().manual_seed(1)))
    return LearnerModels(models, flat, vectorize)


class Scaled(nn.Module):
    vectorizes = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale: Any = None
        self.act = torch.tanh

    def forward(self, inputs: Tensor) -> Any:
        outputs = self.last(self.act(self.first(inputs)))
        return (outputs if self.scale is None else outputs * self.scale), self.scale
