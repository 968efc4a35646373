"""The spectral density of matrices for which LAPACK needs care."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcore.diagnostics import DataLoss, Hessian


def test_density_of_a_matrix_of_low_rank() -> None:
    """The loss of one sample. LAPACK's fast driver does not converge for some of these matrices."""
    for seed in range(12):
        torch.manual_seed(seed)
        model, inputs = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(1, 4)
        loss = DataLoss(model, lambda outputs, _: outputs.square().mean(), [(inputs, torch.zeros(1))])
        hessian = Hessian(model, loss)
        found, full = hessian.density(4, 40), hessian.operator().dense()
        probes = hessian.operator().directions(4, torch.Generator().manual_seed(0))
        expected = ((probes @ torch.as_tensor(full).to(probes)) * probes).sum(dim=1)
        assert (found.weights * found.nodes).sum(axis=1) == pytest.approx(expected.numpy(), abs=1e-4)
