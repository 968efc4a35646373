"""Effective learning rate, noise strengths and spread on quadratics, where all of them are known in closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore.diagnostics import NoiseStatistics
from ddpcore.diagnostics.dynamics import MOST_PRODUCTS, mixtures

LR, D, N = 0.05, 6, 4


class Quadratic(nn.Module):
    """``1/2 (w - c)^T A (w - c)``: a batch ``[B, D, D + 1]`` holds A and c of each sample; the mean over it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype))

    def forward(self, batch: Tensor) -> Tensor:
        away = self.w - batch[..., D]
        return 0.5 * torch.einsum("bi,bij,bj->b", away, batch[..., :D], away).mean()


def problems(seed: int, dtype: torch.dtype) -> Tensor:
    """One sample a learner, ``[N, 1, D, D + 1]``, each with its own A (symmetric, positive) and c."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(N, 1, D, D, generator=generator, dtype=torch.float64)
    centers = torch.randn(N, 1, D, 1, generator=generator, dtype=torch.float64)
    return torch.cat([root @ root.mT / D, centers], dim=-1).to(dtype)


def gradient(sample: np.ndarray, w: np.ndarray) -> np.ndarray:
    return sample[:, :D] @ (w - sample[:, D])


def trained(strategy: Any, dtype: torch.dtype, steps: int, **options: Any) -> tuple[Any, NoiseStatistics, np.ndarray]:
    """The loop, and the weights and the batch before its last step, the one that is measured."""
    model = Quadratic(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=N, vectorize=False)
    held = problems(999, dtype)  # all samples; each learner has one of them, so that shares have Hessians of their own
    batch = problems(0, dtype)
    statistics = NoiseStatistics(
        handle,
        optimizer,
        steps,
        loss=lambda: handle.model(batch).sum(),
        full_loss=lambda: handle.model(held).sum(),
        full_loss_of="all samples",
        **options,
    )
    weights = np.empty(0)
    for step in range(steps):
        batch = problems(step, dtype)
        optimizer.zero_grad()
        handle.model(batch).sum().backward()
        weights = handle.learner.flat.param_LP[:, :D].double().numpy().copy()
        optimizer.step()
    return handle, statistics, weights


def exact(weights: np.ndarray, steps: int, dtype: torch.dtype) -> dict[str, Any]:
    """The equations of the module, term by term."""
    batch = problems(steps - 1, dtype).double().numpy()[:, 0]
    full = problems(999, dtype).double().numpy()[:, 0]
    mean = weights.mean(axis=0)
    own = np.array([gradient(sample, w) for sample, w in zip(batch, weights, strict=True)])
    at_mean = np.array([gradient(sample, mean) for sample in batch])
    g = np.array([gradient(sample, mean) for sample in full]).mean(axis=0)
    g_a, k = own.mean(axis=0), at_mean.mean(axis=0)
    effective = LR * g_a @ g / (g @ g)
    eta = LR * g_a - effective * g
    ways = weights - mean
    hessian, covariance = full[:, :, :D].mean(axis=0), ways.T @ ways / N**2
    eta_s = LR * k - LR * (k @ g) / (g @ g) * g
    away = mean - full[:, :, D]
    return {
        "full_loss": 0.5 * np.mean([x @ a[:, :D] @ x for a, x in zip(full, away, strict=True)]),
        "effective_lr": effective,
        "noise": eta @ eta,  # what stands upright on g
        "ssgd_noise": eta_s @ eta_s,
        "landscape_noise": LR**2
        * np.square(np.mean([a[:, :D] @ x for a, x in zip(batch, ways, strict=True)], axis=0)).sum(),
        "landscape_upright": LR**2 * np.square((g_a - k) - (g_a - k) @ g / (g @ g) * g).sum(),
        "hessian_noise": LR**2 * np.trace(hessian @ covariance @ hessian),
        "grad_squared": g @ g,
        "mean_grad_squared": g_a @ g_a,
        "covariance": covariance,
        "consensus": np.sqrt(np.square(ways).sum(axis=1).mean()),
        "trace": N / (N - 1) * np.square(at_mean - k).sum(axis=1).mean(),
        "true_grad_squared": (N * k @ k - np.square(at_mean).sum(axis=1).mean()) / (N - 1),
    }


NUMBERS = (
    "full_loss",
    "effective_lr",
    "noise",
    "ssgd_noise",
    "landscape_noise",
    "landscape_upright",
    "hessian_noise",
    "grad_squared",
    "mean_grad_squared",
)


@pytest.mark.parametrize(
    ("strategy", "dtype", "tolerance"),
    [
        (lambda: ddpcore.LocalSGD(period=100), torch.float64, 1e-12),
        (lambda: ddpcore.LocalSGD(period=100), torch.float32, 1e-5),
        (lambda: ddpcore.DPSGD(ddpcore.Ring(1)), torch.float32, 1e-5),
    ],
    ids=["local_sgd-float64", "local_sgd-float32", "dpsgd-float32"],
)
def test_learners_that_differ(strategy, dtype, tolerance):
    """In float32 within 1e-5 of the larger of a^2 |g_a|^2 and a: sums of six terms, each rounded some ten times."""
    _, statistics, weights = trained(strategy(), dtype, 8, hessian=True, directions=3)
    record, expected = statistics.records[0], exact(weights, 8, dtype)
    assert record.valid and record.step == 8 and record.at_mean and record.num_steps == 1
    moves, spread = record.dynamics, record.spread
    assert moves.full_gradient == "all samples" and moves.lr == LR
    size = LR**2 * expected["mean_grad_squared"]
    for name in NUMBERS:
        scale = max(abs(expected[name]), size if "noise" in name or "landscape" in name else 0.0)
        assert getattr(moves, name) == pytest.approx(expected[name], abs=tolerance * scale), name
    assert moves.landscape_noise > 0.001 * moves.noise, "or the test says nothing of it"
    assert 0.1 * moves.landscape_noise < moves.landscape_upright < 0.999 * moves.landscape_noise
    assert spread.consensus_distance == pytest.approx(expected["consensus"], rel=tolerance)
    assert spread.trace == pytest.approx(np.trace(expected["covariance"]), rel=tolerance)
    largest = np.linalg.eigvalsh(expected["covariance"])[::-1][:3]
    assert spread.eigenvalues == pytest.approx(tuple(largest), rel=tolerance * 10)
    assert record.whole.trace == pytest.approx(expected["trace"], rel=tolerance)
    assert record.whole.grad_squared == pytest.approx(expected["true_grad_squared"], abs=tolerance * expected["trace"])


@pytest.mark.parametrize("num", [2, 3, MOST_PRODUCTS + 1, MOST_PRODUCTS + 2, 40])
def test_mixtures_of_learners(num):
    """All n - 1 directions of rows that add up to zero, or as many as there are products, drawn evenly from them."""
    first = mixtures(num, 7)
    assert torch.equal(first, mixtures(num, 7)) and not torch.equal(first, mixtures(num, 8))
    with torch.device("meta"):  # whatever torch's default device is
        assert torch.equal(first, mixtures(num, 7))
    assert len(first) == min(num - 1, MOST_PRODUCTS)
    scale = (num - 1) / len(first)
    torch.testing.assert_close(first @ first.T, scale * torch.eye(len(first), dtype=torch.float64))
    torch.testing.assert_close(first.sum(dim=1), torch.zeros(len(first), dtype=torch.float64))
    way_n = torch.linspace(-1, 1, num, dtype=torch.float64).pow(3)  # adds up to zero
    way_n /= way_n.norm()
    squares = torch.stack([(mixtures(num, step) @ way_n).square().sum() for step in range(2000)])
    if num <= MOST_PRODUCTS + 1:
        torch.testing.assert_close(squares, torch.ones_like(squares))
    else:
        assert abs(squares.mean() - 1) < 5 * squares.std() / 2000**0.5
        assert squares.std() < 0.5 * (1 + 5 / 2000**0.5)


def test_more_learners_than_products():
    """Against the full loss's Hessian and the mixtures of that step, whose mean over steps is equation 4."""
    num, step = 3 * N, 4
    model = Quadratic(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(period=100), learners=num, vectorize=False)
    held, batch = (torch.cat([problems(seed + k, torch.float64) for k in range(3)]) for seed in (0, 10))
    loss, full_loss = lambda: handle.model(batch).sum(), lambda: handle.model(held).sum()
    statistics = NoiseStatistics(handle, optimizer, step + 1, loss=loss, full_loss=full_loss, hessian=True)
    weights_ND = torch.empty(0)
    for _ in range(step + 1):
        optimizer.zero_grad()
        loss().backward()
        weights_ND = handle.learner.flat.param_LP[:, :D].clone()
        optimizer.step()
    hessian_DD = held[:, 0, :, :D].mean(dim=0)
    mixed_KD = mixtures(num, step) @ (weights_ND - weights_ND.mean(dim=0))
    expected = LR**2 / num**2 * (mixed_KD @ hessian_DD).square().sum()
    assert statistics.records[0].dynamics.hessian_noise == pytest.approx(float(expected), rel=1e-12)


def test_ssgd_has_no_landscape_noise():
    _, statistics, weights = trained(ddpcore.SSGD(), torch.float64, 5, hessian=True)
    record, expected = statistics.records[0], exact(weights, 5, torch.float64)
    moves = record.dynamics
    assert record.spread is None
    assert moves.landscape_noise == moves.landscape_upright == 0.0 and moves.hessian_noise == 0.0
    for name in ("full_loss", "effective_lr", "noise", "grad_squared", "mean_grad_squared"):
        assert getattr(moves, name) == pytest.approx(expected[name], rel=1e-11), name
    assert moves.ssgd_noise == pytest.approx(moves.noise, rel=1e-12)


def test_directions_are_eigenvectors_of_the_covariance():
    handle, statistics, _ = trained(ddpcore.LocalSGD(period=100), torch.float64, 8)
    values, directions_KP = statistics.directions(3)
    ways = handle.learner.flat.param_LP[:, :D].numpy()
    ways = ways - ways.mean(axis=0)
    covariance = ways.T @ ways / N**2
    for value, direction in zip(values.tolist(), directions_KP[:, :D].numpy(), strict=True):
        assert np.linalg.norm(direction) == pytest.approx(1.0, rel=1e-12)
        np.testing.assert_allclose(covariance @ direction, value * direction, atol=1e-12 * float(values[0]))
    assert values.tolist() == pytest.approx(np.linalg.eigvalsh(covariance)[::-1][:3].tolist(), rel=1e-10)


def test_directions_that_the_covariance_does_not_have():
    """Four learners differ in three directions: no eigenvalue is below zero, and the fourth has no direction."""
    for seed in range(5):
        torch.manual_seed(seed)
        _, statistics, _ = trained(ddpcore.LocalSGD(period=100), torch.float32, 3)
        values, directions_KP = statistics.directions(4)
        assert (values[:3] > 0).all() and values[3] == 0
        assert directions_KP.norm(dim=1).tolist() == pytest.approx([1, 1, 1, 0], rel=1e-5)


def test_equal_hessians_make_no_landscape_noise():
    """To first order the mean gradient does not see a spread whose mean is zero, whatever equation 4 says."""
    model = Quadratic(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(period=100), learners=N, vectorize=False)
    batch = problems(3, torch.float64)
    batch[..., :D] = batch[:1, :, :, :D]  # one A for all, and a c of each learner's own
    loss = lambda: handle.model(batch).sum()  # noqa: E731
    statistics = NoiseStatistics(handle, optimizer, 4, loss=loss, full_loss=loss, hessian=True)
    for _ in range(4):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    moves = statistics.records[0].dynamics
    assert moves.hessian_noise > 0
    assert moves.landscape_noise < 1e-12 * moves.hessian_noise
