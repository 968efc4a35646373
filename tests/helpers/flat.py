"""A model of many layouts, flattened, and gradients for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddpcore.parameters.flat import FlatParameters


def network() -> nn.Sequential:
    """Weights of several layouts: channels_last, transposed, a scalar, and sizes off the alignment."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Linear(7, 6), nn.Linear(6, 4))
    model[0].to(memory_format=torch.channels_last)
    model[1].weight = nn.Parameter(torch.randn(7, 6).t())
    model.register_parameter("scale", nn.Parameter(torch.tensor(3.5)))
    return model


def flatten(model: nn.Module, **options: Any) -> FlatParameters:
    return FlatParameters([model.named_parameters()], **options)


def fill_gradients(model: nn.Module) -> dict[str, Tensor]:
    given = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = given[name].clone()
    return given


def inside(tensor: Tensor, buffer: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
