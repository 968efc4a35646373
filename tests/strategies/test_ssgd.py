"""Synchronous SGD against its equation: w(t+1) = w(t) - a/n sum_k g_k(w(t))."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore.strategies import SSGD


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_equation(n: int) -> None:
    """Quadratics 0.5 |w x - y|^2, one a learner; the equation in float64."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(n, 6, 4), torch.randn(n, 6, 2)
    model = nn.Linear(4, 2, bias=False)
    w: Tensor = model.weight.detach().double().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = ddpcore.distribute(model, optimizer, SSGD(), learners=n, vectorize=False)
    for _ in range(5):
        optimizer.zero_grad()
        (0.5 * (handle.model(inputs) - targets).square()).sum().backward()
        optimizer.step()
        gradients = [(x.double() @ w.T - y.double()).T @ x.double() for x, y in zip(inputs, targets, strict=True)]
        w = w - 0.01 * sum(gradients) / n
        for row in model.weight.detach():
            torch.testing.assert_close(row.double(), w, rtol=1e-5, atol=1e-6)
            assert torch.equal(row, model.weight[0])


def test_bytes_are_one_average_a_step() -> None:
    model = nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = ddpcore.distribute(model, optimizer, SSGD(), learners=4)
    for _ in range(3):
        optimizer.zero_grad()
        handle.model(torch.ones(4, 2, 16)).sum().backward()
        optimizer.step()
    assert handle.learner.comm.bytes_sent == 3 * (3 * 256 * 4)  # gathered: three others
    assert handle.learner.step == 3
