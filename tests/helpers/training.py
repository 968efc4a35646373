"""A small model, its data and its strategies, as the tests of ``distribute`` share them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ddpcore
from ddpcore.optim import FusedSGD

SMALL = {"bucket_bytes": 128, "first_bucket_bytes": 64}
L = 3
STRATEGIES = {
    "ssgd": ddpcore.SSGD,
    "dpsgd": lambda: ddpcore.DPSGD(ddpcore.Ring()),
    "local_sgd": lambda: ddpcore.LocalSGD(period=2),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda p: FusedSGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def mlp(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def samples(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, 5, generator=generator), torch.randint(3, shape, generator=generator)


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """The learners' mean losses, added up."""
    return sum(F.cross_entropy(row, label) for row, label in zip(outputs, labels, strict=True))


def weights_of_learners(handle: ddpcore.Distributed) -> Tensor:
    """Trained weights ``[L, x]`` in the order of the model."""
    trained = [[p.detach().flatten() for p in model.parameters() if p.requires_grad] for model in handle.models]
    return torch.stack([torch.cat(weights) for weights in trained])


def rows_of(handle: ddpcore.Distributed, name: str) -> Tensor:
    """A parameter or buffer of all learners ``[L, *S]``, a copy."""
    return torch.stack([model.state_dict()[name].detach() for model in handle.models])


def set_rows(handle: ddpcore.Distributed, name: str, rows_LS: Tensor) -> None:
    """Overwrite a parameter of each learner."""
    with torch.no_grad():
        for model, row in zip(handle.models, rows_LS, strict=True):
            model.get_parameter(name).copy_(row)


def flat_weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_near(ours: Tensor, theirs: Tensor, ulps: float = 8) -> None:
    unit = torch.finfo(torch.float32).eps * theirs.abs().max().item()
    worst = (ours - theirs).abs().max().item() / unit
    assert worst <= ulps, f"{worst:.1f} ULPs of the largest value apart"


class Branches(nn.Module):
    """A layer that is always used, and two of which ``branch`` names the one in use."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.first, self.second = (nn.Linear(5, 3) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.always(inputs) + getattr(self, self.branch)(inputs)

    branch = "first"
