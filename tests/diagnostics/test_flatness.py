"""Flatness on functions whose Hessians are known, and what a change of scale does to it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from ddpcore.diagnostics import Flatness, flatness
from ddpcore.diagnostics.flatness import STRENGTH

D = 12


class Weights(nn.Module):
    """Nothing but weights, float64 ``[D]``, two tensors of them."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(values[:5].clone()), nn.Parameter(values[5:].clone())

    def row(self) -> Tensor:
        return torch.cat([self.first, self.second])


def quadratic(num: int = D) -> tuple[Tensor, Tensor]:
    """A Hessian, indefinite, whose most negative eigenvalue is larger than the largest; and weights."""
    generator = torch.Generator().manual_seed(3)
    rotation, _ = torch.linalg.qr(torch.randn(num, num, generator=generator, dtype=torch.float64))
    values = torch.linspace(-5, 4, num, dtype=torch.float64)
    return rotation * values @ rotation.T, torch.randn(num, generator=generator, dtype=torch.float64)


def test_quadratic() -> None:
    hessian, w = quadratic()
    model = Weights(w)
    seen = flatness(model, lambda: 0.5 * model.row() @ hessian @ model.row())
    relative = w.abs()[:, None] * hessian * w.abs()
    assert seen.loss == pytest.approx(float(0.5 * w @ hessian @ w), rel=1e-12)
    assert seen.hessian_eigenvalue == pytest.approx(4.0, rel=2e-3), "the largest, not the one of largest magnitude"
    assert seen.relative_eigenvalue == pytest.approx(float(torch.linalg.eigvalsh(relative)[-1]), rel=2e-3)
    exact = float(relative.trace())
    assert abs(seen.relative_trace - exact) < 5 * seen.relative_trace_error
    assert abs(seen.loss_increase - STRENGTH**2 / 2 * exact) < 5 * seen.loss_increase_error
    assert torch.equal(model.row(), w)


def test_a_parameter_of_one_number() -> None:
    """It may have no dimension."""
    values = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    model = Weights(values[:2])
    model.scale = nn.Parameter(values[2])
    seen = flatness(model, lambda: 0.5 * (values[:2] * model.row().square()).sum() + 2.0 * model.scale.square())
    assert seen.hessian_eigenvalue == pytest.approx(4.0, rel=2e-3)
    assert seen.relative_trace == pytest.approx(27.0 + 8.0 + 4.0, rel=1e-12)


def test_a_diagonal_trace_is_exact() -> None:
    """Of a diagonal matrix Hutchinson's estimate has no error, whatever the signs."""
    values, w = torch.arange(1.0, D + 1, dtype=torch.float64), torch.linspace(-1, 2, D, dtype=torch.float64)
    model = Weights(w)
    seen = flatness(model, lambda: 0.5 * (values * model.row().square()).sum())
    assert seen.relative_trace == pytest.approx(float((values * w.square()).sum()), rel=1e-12)
    assert seen.relative_trace_error < 1e-12


def test_whatever_the_default_device_is() -> None:
    hessian, w = quadratic()
    model = Weights(w)
    loss = lambda: 0.5 * model.row() @ hessian @ model.row()  # noqa: E731
    expected = flatness(model, loss)
    with torch.device("meta"):
        assert flatness(model, loss) == expected


def test_parts_add_up() -> None:
    hessian, w = quadratic()
    model = Weights(w)

    def parts() -> Iterator[Tensor]:
        for share in (0.25, 0.75):
            yield share * 0.5 * model.row() @ hessian @ model.row()

    whole = flatness(model, lambda: 0.5 * model.row() @ hessian @ model.row())
    assert vars(flatness(model, parts)) == pytest.approx(vars(whole), rel=1e-9)


class Attention(nn.Module):
    """One head, which looks at tokens ``[B, T, 4]``, by torch's attention; or by its formula."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(4, 12)

    def forward(self, tokens: Tensor, by_formula: bool = False) -> Tensor:
        query, key, value = self.query_key_value(tokens)[:, None].chunk(3, dim=-1)
        if by_formula:
            return (query @ key.mT / 4**0.5).softmax(dim=-1) @ value
        return nn.functional.scaled_dot_product_attention(query, key, value)


def test_attention() -> None:
    """Whose fused kernels, torch's choice of itself, have no second derivatives."""
    torch.manual_seed(0)
    model, tokens = Attention().double(), torch.randn(3, 5, 4, dtype=torch.float64)
    seen = flatness(model, lambda: model(tokens).square().mean())
    expected = flatness(model, lambda: model(tokens, by_formula=True).square().mean())
    assert vars(seen) == pytest.approx(vars(expected), rel=1e-9)
    assert expected.hessian_eigenvalue > 0


@pytest.mark.parametrize("num", [1, 2])
def test_very_few_weights(num: int) -> None:
    hessian, w = quadratic(num)
    model = nn.Module()
    model.w = nn.Parameter(w)
    seen = flatness(model, lambda: 0.5 * model.w @ hessian @ model.w)
    assert seen.hessian_eigenvalue == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-9)


def network(factor: float) -> Flatness:
    """Of a net with ReLU, a layer scaled up and the next one down: the same function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    inputs, labels = torch.randn(40, 6, dtype=torch.float64), torch.randint(3, (40,))
    with torch.no_grad():
        model[0].weight *= factor
        model[0].bias *= factor
        model[2].weight /= factor
    return flatness(model, lambda: nn.functional.cross_entropy(model(inputs), labels), seed=1)


def test_rescaling_a_layer_pair_moves_the_hessian_alone() -> None:
    plain, scaled = network(1.0), network(8.0)
    for name in ("loss", "relative_trace", "loss_increase"):
        assert getattr(scaled, name) == pytest.approx(getattr(plain, name), rel=1e-9), name
    assert scaled.relative_eigenvalue == pytest.approx(plain.relative_eigenvalue, rel=2e-3)
    assert scaled.hessian_eigenvalue > 2 * plain.hessian_eigenvalue


def test_the_model_is_left_as_it_was() -> None:
    """Also where the loss raises while other weights are in it."""
    model = nn.Linear(3, 1)
    inputs, weight, calls = torch.randn(5, 3), model.weight, 0
    before = model.weight.detach().clone()

    def loss() -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 20:  # past the trace, among the noise
            raise RuntimeError("gone")
        return model(inputs).square().mean()

    with pytest.raises(RuntimeError, match="gone"):
        flatness(model, loss)
    assert model.weight is weight and torch.equal(model.weight, before) and model.weight.grad is None


def test_refusals() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="must return one number with a graph"):
        flatness(model, lambda: model(torch.ones(3, 2)))
    with pytest.raises(ValueError, match="nothing to measure"):
        flatness(nn.ReLU(), lambda: torch.zeros(()))


def test_training_mode_leaves_no_trace() -> None:
    """Running statistics and random numbers, in a model that was left in training mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))
    inputs = torch.randn(8, 4)
    before, state = [b.clone() for b in model.buffers()], torch.get_rng_state()
    flatness(model, lambda: model(inputs).square().mean())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(b, c) for b, c in zip(model.buffers(), before, strict=True))


def test_dropout_has_one_mask() -> None:
    """All evaluations are of one function: as where the loss itself puts the generator back before each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    inputs, labels = torch.randn(40, 5, dtype=torch.float64), torch.randint(3, (40,))
    state = torch.get_rng_state()

    def parts() -> Iterator[Tensor]:
        for half in (slice(20), slice(20, 40)):
            yield nn.functional.cross_entropy(model(inputs[half]), labels[half]) / 2

    def with_one_mask() -> Iterator[Tensor]:
        torch.set_rng_state(state)
        yield from parts()

    assert flatness(model, parts) == flatness(model, with_one_mask)
    torch.manual_seed(1)
    assert flatness(model, parts) != flatness(model, with_one_mask), "or there is no mask"


def test_weights_that_are_not_finite_have_no_measures() -> None:
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    found = flatness(model, lambda: model(torch.ones(3, 4)).tanh().square().mean())
    assert math.isnan(found.hessian_eigenvalue) and math.isnan(found.relative_trace) and math.isnan(found.loss)


def test_a_linear_loss_has_no_curvature() -> None:
    model = nn.Linear(4, 1)
    found = flatness(model, lambda: model(torch.ones(3, 4)).mean())
    assert (found.hessian_eigenvalue, found.relative_eigenvalue, found.relative_trace) == (0.0, 0.0, 0.0)


def test_whatever_the_default_dtype_is() -> None:
    model, found = nn.Linear(20, 1), []
    inputs = torch.randn(32, 20)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            found.append(flatness(model, lambda: model(inputs).square().mean(), seed=0))
        finally:
            torch.set_default_dtype(torch.float32)
    assert found[0] == found[1] == found[2]
