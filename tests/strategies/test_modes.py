"""Strategies and statistics compute the same inside the modes of torch that a program may have set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore.diagnostics import DataLoss, Hessian, NoiseStatistics, flatness
from ddpcore.optim import FusedAdamW
from ddpcore.strategies.compression import Int8, TopK

L = 3
Mode = Callable[[], AbstractContextManager[Any]]


def outer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


STRATEGIES: dict[str, Callable[[], ddpcore.Strategy]] = {
    "ssgd": ddpcore.SSGD,
    "noisy": lambda: ddpcore.NoisySSGD(0.1, seed=2),
    "noisy apart": lambda: ddpcore.NoisySSGD(0.1, seed=2, where="per_learner"),
    "dpsgd": lambda: ddpcore.DPSGD(ddpcore.Ring()),
    "dpsgd int8": lambda: ddpcore.DPSGD(ddpcore.Ring(), compression=Int8()),
    "dpsgd topk": lambda: ddpcore.DPSGD(ddpcore.Ring(), compression=TopK(ratio=0.2)),
    "diloco": lambda: ddpcore.LocalSGD(2, outer=outer),
    "streaming": lambda: ddpcore.LocalSGD(4, fragments=2, overlap=2, alpha=0.5, outer=outer),
    "noloco": lambda: ddpcore.NoLoCo(period=2),
    "gasloc": lambda: ddpcore.GASLoC(period=2),
    "slowmo": lambda: ddpcore.SlowMo(ddpcore.DPSGD(), period=2),
    "push_sum": lambda: ddpcore.PushSum(ddpcore.OnePeerExponential()),
    "tracking": lambda: ddpcore.GradientTracking(ddpcore.Ring()),
    "exact diffusion": lambda: ddpcore.ExactDiffusion(ddpcore.Ring()),
    "adpsgd": lambda: ddpcore.ADPSGD(speeds=[1.0, 1.0, 0.5]),
}


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Mode] = {
    "default dtype float64": default_dtype,
    "default device meta": lambda: torch.device("meta"),
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
}


def trained(name: str, mode: Mode, optimizer_of: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = optimizer_of(model.parameters())
    with mode():
        handle = ddpcore.distribute(model, optimizer, STRATEGIES[name](), learners=L, vectorize=False)
    for step in range(5):
        inputs = torch.randn(L, 8, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        handle.model(inputs).square().sum().backward()
        with mode():
            optimizer.step()
    with mode():
        average = handle.evaluation_model()
        state = handle.state_dict()
        handle.load_state_dict(state)
        distance = handle.consensus_distance()
    rows = [p.detach().clone() for one in (*handle.models, average) for p in one.parameters()]
    return [*rows, torch.tensor(distance, dtype=torch.float64)]


OPTIMIZERS = {
    "torch": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "fused": lambda params: FusedAdamW(params, lr=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_in_a_mode_of_torch(name, optimizer, assert_same_bits):
    expected = trained(name, nullcontext, OPTIMIZERS[optimizer])
    for mode in MODES:
        for found, want in zip(trained(name, MODES[mode], OPTIMIZERS[optimizer]), expected, strict=True):
            assert_same_bits(found, want, mode)


def measured(mode: Mode) -> dict[str, Any]:
    """Statistics of all kinds. The forward passes of the program itself are outside of the mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with mode():
        handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=L, vectorize=False)
        statistics = NoiseStatistics(handle, optimizer, 1, batch_size=8)
    for step in range(3):
        optimizer.zero_grad()
        handle.model(torch.randn(L, 8, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        with mode():
            optimizer.step()
    plain = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    plain.load_state_dict(handle.evaluation_model().state_dict())
    data = [(torch.randn(8, 5, generator=torch.Generator().manual_seed(9)), torch.zeros(8, 3))]
    hessian = Hessian(plain, DataLoss(plain, nn.functional.mse_loss, data))
    with mode():
        record = statistics.records[-1]
        values = hessian.eigenvalues()
        return {
            "noise": (record.whole.trace, record.whole.grad_squared),
            "eigenvalues": tuple(values.values),
            "trace": hessian.trace(60).value,
            "density": tuple(hessian.density(2, 5).nodes.reshape(-1)),
            "flatness": flatness(plain, DataLoss(plain, nn.functional.mse_loss, data)).relative_trace,
        }


@pytest.mark.parametrize("mode", ["default dtype float64", "default device meta"])
def test_statistics_in_a_mode_of_torch(mode):
    expected = measured(nullcontext)
    for name, found in measured(MODES[mode]).items():
        assert found == expected[name], name
