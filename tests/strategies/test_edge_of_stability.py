"""Up to which curvature each algorithm trains on a quadratic, in closed form, as in the study edge-of-stability.

All learners have the loss ``h / 2 |w|^2``. A difference of the learners along an eigenvector of W with the eigenvalue
lambda is multiplied in each step by ``lambda - a h`` if learners average while they compute, and by
``lambda (1 - a h)`` if they average after the step or before the gradient. Their mean is multiplied by ``1 - a h``.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore import DPSGD, SSGD, Complete, FromMatrix, LocalSGD, Ring
from helpers.training import weights_of_learners

N, RATE = 5, 0.1
NEIGHBOURS = math.cos(4 * math.pi / 5)  # the smallest eigenvalue of the mean of both neighbours on a ring of five


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16))

    def forward(self, curvature: Tensor) -> Tensor:
        return (curvature / 2 * self.weight.square()).sum()


def lazy_ring(share: float) -> FromMatrix:
    """A ring of five, with a share for the learner itself."""
    eye = torch.eye(N)
    return FromMatrix((share * eye + (1 - share) / 2 * (eye.roll(1, 0) + eye.roll(-1, 0))).double().numpy())


def growth(strategy: Any, curvature: float, num_steps: int = 100) -> float:
    """|w| of all learners after the steps, relative to |w| after half of them."""
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=N, vectorize=False)
    start = torch.randn(N, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for one, row in zip(handle.models, start, strict=True):
            one.weight.copy_(start[0] if strategy.traits.stays_identical else row)
    norms = []
    for step in range(num_steps):
        optimizer.zero_grad()
        handle.model(torch.full((N, 1), curvature)).sum().backward()
        optimizer.step()
        if step + 1 in (num_steps // 2, num_steps):
            norms.append(float(weights_of_learners(handle).double().norm()))
    return norms[1] / norms[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "bound"),
    [
        (lambda: SSGD(), 2),
        (lambda: LocalSGD(period=8), 2),
        (lambda: DPSGD(Ring(), order="adapt_then_combine"), 2),
        (lambda: DPSGD(Ring(), order="combine_then_adapt"), 2),
        (lambda: DPSGD(lazy_ring(0.1), order="adapt_then_combine"), 2),
        (lambda: DPSGD(lazy_ring(0.1), order="combine_then_adapt"), 2),
        (lambda: DPSGD(Complete()), 1),
        (lambda: DPSGD(lazy_ring(0.1)), 1 + 0.1 + 0.9 * NEIGHBOURS),
        (lambda: DPSGD(lazy_ring(0.5)), 1 + 0.5 + 0.5 * NEIGHBOURS),
        (lambda: DPSGD(lazy_ring(0.95)), 1 + 0.95 + 0.05 * NEIGHBOURS),
    ],
    ids=["ssgd", "local", "atc", "cta", "atc-0.1", "cta-0.1", "awc-complete", "awc-0.1", "awc-0.5", "awc-0.95"],
)
def test_curvature_up_to_which_weights_stay_bounded(strategy: Any, bound: float) -> None:
    """The bound is a h: just below it weights shrink, just above it they grow."""
    assert growth(strategy(), 0.97 * bound / RATE) < 0.9
    assert growth(strategy(), 1.03 * bound / RATE) > 1.1
