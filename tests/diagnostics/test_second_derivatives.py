"""What has no second derivative, or a wrong one, is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ddpcore
from ddpcore.diagnostics import DataLoss, Hessian, HessianStatistics, NoiseStatistics, flatness, landscape, random_plane


@pytest.mark.parametrize("make", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norm(make: Callable[..., nn.Module]) -> None:
    """In training mode its vectors follow the weights, which autograd does not see; in eval mode they are constants."""
    torch.manual_seed(0)
    model = nn.Sequential(make(nn.Linear(6, 8)), nn.Tanh(), make(nn.Linear(8, 2))).double()
    inputs = torch.randn(20, 6, dtype=torch.float64)
    for _ in range(200):
        model(inputs)
    loss = lambda: model(inputs).sin().mean()  # noqa: E731
    for call in (Hessian(model, loss).trace, lambda: flatness(model, loss)):
        with pytest.raises(ValueError, match=r"spectral_norm of 0\S* follows the weights .* call model.eval\(\)"):
            call()

    frozen = nn.Sequential(make(nn.Linear(6, 8).requires_grad_(False)), nn.Linear(8, 2)).double()
    assert Hessian(frozen, lambda: frozen(inputs).sin().mean()).trace().value  # its vectors follow no trained weight

    def evaluated() -> Tensor:
        """The loss may change the mode."""
        model.eval()
        result = model(inputs).sin().mean()
        model.train()
        return result

    hessian = Hessian(model, evaluated)
    weights, step = hessian.weights.values_P, 1e-5
    gradients = []
    for sign in (1, -1):
        for row in torch.eye(hessian.numel, dtype=torch.float64)[:4]:
            with hessian.weights.at(weights + sign * step * row):
                parts = torch.autograd.grad(evaluated(), hessian.weights.parameters)
                gradients.append(nn.utils.parameters_to_vector(parts))
    differences = (torch.stack(gradients[:4]) - torch.stack(gradients[4:])) / (2 * step)
    found = hessian.product(torch.eye(hessian.numel, dtype=torch.float64)[:4])
    torch.testing.assert_close(found, differences, rtol=1e-6, atol=1e-8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(2), learners=3)
    of_all = lambda: handle.model(inputs.expand(3, 20, 6)).sin().mean((1, 2)).sum()  # noqa: E731
    HessianStatistics(handle, of_all, every=1, top=1)
    of_all().backward()
    with pytest.raises(ValueError, match="spectral_norm of"):
        optimizer.step()


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "_ctc_loss_backward": lambda y: F.ctc_loss(
        y.view(5, 4, 4).log_softmax(2), torch.ones(4, 2).long(), torch.full((4,), 5), torch.full((4,), 2)
    ),
    "_cdist_backward": lambda y: torch.cdist(y, torch.ones(3, 4).double()).mean(),
    "_pdist_backward": lambda y: F.pdist(y).mean(),
    "hardsigmoid_backward": lambda y: F.hardsigmoid(y).square().mean(),
    "multi_margin_loss_backward": lambda y: F.multi_margin_loss(y, torch.arange(20) % 4),
    "_embedding_bag_backward": lambda y: F.embedding_bag(torch.zeros(2, 2).long(), y).square().mean(),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_operations_without_second_derivatives_are_named() -> None:
    """Or they are right: torch 2.14 has two of them."""
    torch.manual_seed(0)
    model, step = nn.Linear(6, 4).double(), 1e-5 * torch.randn(28, dtype=torch.float64)
    inputs = torch.randn(20, 6, dtype=torch.float64)
    for name, loss_fn in LOSSES.items():
        loss = lambda loss_fn=loss_fn: loss_fn(model(inputs))  # noqa: E731
        named = f"torch has no derivative of {name}, which second derivatives need: compute"
        hessian, ends = Hessian(model, loss), list[Tensor]()
        try:
            found = hessian.product(step)
        except ValueError as error:
            assert str(error).startswith(named)
            with pytest.raises(ValueError, match=named):
                flatness(model, loss)
            continue
        for sign in (1, -1):
            with hessian.weights.at(hessian.weights.values_P + sign * step / 2):
                slopes = torch.autograd.grad(loss(), hessian.weights.parameters)
                ends.append(nn.utils.parameters_to_vector(slopes))
        torch.testing.assert_close(found, ends[0] - ends[1], rtol=1e-5, atol=1e-12)


def test_compiled_models_are_one_line() -> None:
    """In the Hessian and the Gauss-Newton matrix of one model, its flatness, and statistics of one or more learners."""
    torch.compiler.reset()  # other tests compile nn.Linear, and above a number of times torch runs it uncompiled
    torch.manual_seed(0)
    model, inputs = nn.Linear(6, 3), torch.randn(20, 6)
    compiled = torch.compile(model, backend="aot_eager")
    data = DataLoss(compiled, F.cross_entropy, [(inputs, torch.arange(20) % 3)])
    loss = lambda: compiled(inputs).tanh().square().mean()  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    HessianStatistics(model, loss, optimizer=optimizer, every=1, top=1)
    calls = [Hessian(model, loss).trace, Hessian(compiled, data, gauss_newton=True).trace, optimizer.step]
    for call in (*calls, lambda: flatness(compiled, loss)):
        with pytest.raises(ValueError, match=r"compiled, and torch.compile differentiates once: let the loss call"):
            call()


class Recomputed(nn.Module):
    """Its first layer is a checkpoint whose backward pass is one inside another, and no input needs a gradient."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.use_reentrant = nn.Linear(6, 5), nn.Linear(5, 2), use_reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(self.first, inputs.requires_grad_(), use_reentrant=self.use_reentrant)
        return self.second(hidden.tanh())


def test_checkpoints_that_hide_their_weights_are_named() -> None:
    """torch.autograd.grad() takes such weights for unused; a backward pass, and so the training, reaches them."""
    torch.manual_seed(0)
    inputs, refused = torch.randn(20, 6), pytest.raises(ValueError, match=r"hides its weights .* use_reentrant=False")
    for use_reentrant, expected in ((True, refused), (False, nullcontext())):
        model = Recomputed(use_reentrant)
        loss = lambda model=model: model(inputs).square().mean()  # noqa: E731
        data = DataLoss(model, F.mse_loss, [(inputs, torch.zeros(20, 2))])
        for hessian in (Hessian(model, loss), Hessian(model, data), Hessian(model, data, gauss_newton=True)):
            with expected:
                assert hessian.product(torch.ones(hessian.numel))[:30].count_nonzero() == 30
        with expected:
            flatness(model, loss)
        model = Recomputed(use_reentrant=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2)

        def full_loss(handle: Any = handle, use_reentrant: bool = use_reentrant) -> Tensor:
            for one in handle.models:
                one.use_reentrant = use_reentrant
            losses = [one(inputs).square().mean() for one in handle.models]
            for one in handle.models:
                one.use_reentrant = False
            return torch.stack(losses).sum()

        NoiseStatistics(handle, optimizer, every=1, full_loss=full_loss)
        for one in handle.models:
            one(inputs).square().mean().backward()
        with expected:
            optimizer.step()


class Filter(nn.Module):
    """A product in the frequency domain, with real parameters that are viewed as complex."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(2, 7), nn.Parameter(torch.randn(7))
        self.factors = nn.Parameter(torch.randn(4, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.first(inputs)) * torch.view_as_complex(self.factors)
        return torch.fft.irfft(spectrum, n=7).tanh() * self.scale


def test_parameters_that_are_viewed_as_complex() -> None:
    """torch does so only at an even place in memory, and a vector of all parameters has parts at odd ones."""
    torch.manual_seed(0)
    model, inputs, targets = Filter().double(), torch.randn(9, 2).double(), torch.randn(9, 7).double()
    data, parameters = DataLoss(model, F.mse_loss, [(inputs, targets)]), list(model.parameters())
    slopes = torch.autograd.grad(F.mse_loss(model(inputs), targets), parameters, create_graph=True)
    elements = [one for slope in slopes for one in slope.reshape(-1)]
    rows = [torch.autograd.grad(one, parameters, retain_graph=True, materialize_grads=True) for one in elements]
    exact = torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])
    hessian = Hessian(model, data)
    every = torch.eye(len(exact), dtype=torch.float64)
    torch.testing.assert_close(hessian.product(every), exact)
    assert hessian.eigenvalues(2, 2).values[0] == pytest.approx(torch.linalg.eigvalsh(exact)[-1].item(), rel=1e-3)
    half = Hessian(model, data, gauss_newton=True).product(every)
    torch.testing.assert_close(half, half.T)
    weights = hessian.weights.values_P
    with hessian.weights.at(weights * 2):
        torch.testing.assert_close(nn.utils.parameters_to_vector(parameters), weights * 2)
        assert sum(data()).isfinite()
    surface = landscape(data, random_plane(model), x=[0, 1], y=[0, 1], curvature=True)
    assert surface.values["train_loss"][0, 0] == pytest.approx(sum(data()).item())
