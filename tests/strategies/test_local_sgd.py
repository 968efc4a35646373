"""Local SGD against its equation: steps alone, and the mean of the weights after every H-th."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ddpcore
from ddpcore.strategies import LocalSGD


@pytest.mark.parametrize("period", [1, 2, 3, 10])
def test_the_equation(period: int) -> None:
    """With momentum, which stays local; the equation in float64."""
    n = 3
    torch.manual_seed(0)
    inputs, targets = torch.randn(n, 6, 4), torch.randn(n, 6, 2)
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, LocalSGD(period), learners=n, vectorize=False)
    w = model.weight.detach().double().clone()
    momentum = torch.zeros_like(w)
    for step in range(7):
        optimizer.zero_grad()
        (0.5 * (handle.model(inputs) - targets).square()).sum().backward()
        optimizer.step()
        gradients = torch.einsum(
            "jbo,jbi->joi", torch.einsum("jbi,joi->jbo", inputs.double(), w) - targets.double(), inputs.double()
        )
        momentum = 0.9 * momentum + gradients
        w = w - 0.01 * momentum
        if (step + 1) % period == 0:
            w = w.mean(dim=0).expand_as(w).clone()
        torch.testing.assert_close(model.weight.detach().double(), w, rtol=1e-5, atol=1e-5)
        averaged = torch.equal(model.weight[0], model.weight[1])
        assert averaged == ((step + 1) % period == 0)
    assert handle.learner.comm.bytes_sent == (7 // period) * 2 * 16 * 4  # gathered: two others, 16 floats


@pytest.mark.parametrize("period", [0, -1])
def test_impossible_periods(period: int) -> None:
    with pytest.raises(ValueError, match=f"period is {period}"):
        LocalSGD(period)
