"""SimpleNet is 10-50-2 with ReLU."""

from __future__ import annotations

import torch

from ddpcore.models.small import SimpleNet


def test_parameters_and_formula() -> None:
    model = SimpleNet((10,), 2)
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    assert shapes == [(50, 10), (50,), (2, 50), (2,)]
    assert sum(parameter.numel() for parameter in model.parameters()) == 652
    inputs = torch.randn(6, 10)
    hidden_weight, hidden_bias, weight, bias = model.parameters()
    expected = (inputs @ hidden_weight.T + hidden_bias).relu() @ weight.T + bias
    torch.testing.assert_close(model(inputs), expected)
