"""The Hessian against exact matrices in float64, and what a call leaves behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ddpcore.diagnostics import DataLoss, Hessian
from ddpcore.diagnostics.spectra import Operator, SpectralDensity, extreme_eigenvalues, spectral_density, trace
from ddpcore.models.transformers import ViT

SIZES = (7, 9, 4)


def network(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(SIZES[0], SIZES[1]), *more, nn.Tanh(), nn.Linear(SIZES[1], SIZES[2])]
    return nn.Sequential(*layers).double()


def batches(num: int = 25, size: int = 10) -> list[tuple[Tensor, Tensor]]:
    """The last one is smaller."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num, SIZES[0], generator=generator, dtype=torch.float64)
    labels = torch.randint(SIZES[2], (num,), generator=generator)
    return list(zip(inputs.split(size), labels.split(size), strict=True))


def exact(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The Hessian of the mean loss over all samples at once, by torch.

    Not by torch.func.hessian: in torch 2.13 that of a layer norm with weights is wrong, and not even symmetric.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    parameters = dict(model.named_parameters())
    inputs, labels = (torch.cat(parts) for parts in zip(*data, strict=True))

    def loss(row: Tensor) -> Tensor:
        parts = row.split([parameters[name].numel() for name in names])
        weights = {name: part.view_as(parameters[name]) for name, part in zip(names, parts, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, weights, (inputs,)), labels)

    with sdpa_kernel(SDPBackend.MATH):
        row = torch.cat([parameters[name].detach().reshape(-1) for name in names])
        return cast(Tensor, torch.autograd.functional.hessian(loss, row))


def exact_gauss_newton(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    """``J^T H_out J`` of the mean cross-entropy, from the Jacobian of each sample."""
    parameters = list(model.parameters())
    expected = torch.zeros(())
    inputs = torch.cat([one for one, _ in data])
    for one in inputs:
        outputs = model(one[None])[0]
        rows = [torch.autograd.grad(output, parameters, retain_graph=True) for output in outputs]
        jacobian = torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])
        p = outputs.detach().softmax(0)
        expected = expected + jacobian.T @ (torch.diag(p) - torch.outer(p, p)) @ jacobian / len(inputs)
    return expected


def random_rows(num: int, numel: int) -> Tensor:
    return torch.randn(num, numel, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_products_are_those_of_the_exact_hessian() -> None:
    """Of one vector and of several; batches of different sizes."""
    model, data = network(), batches()
    hessian, expected = Hessian(model, DataLoss(model, F.cross_entropy, data)), exact(model, data)
    vectors = random_rows(11, hessian.numel)
    for _ in range(2):
        torch.testing.assert_close(hessian.product(vectors), vectors @ expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(hessian.product(vectors[0]), vectors[0] @ expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("gauss_newton", [False, True])
def test_a_vision_transformer(gauss_newton: bool) -> None:
    """torch's fused attention has no second derivatives, and its products are those of the exact Hessian."""
    torch.manual_seed(0)
    model = ViT((1, 8, 8), 3, width=4, depth=1, num_heads=2, mlp_width=4).double().eval()
    inputs, labels = torch.randn(6, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    data = list(zip(inputs.split(4), labels.split(4), strict=True))
    hessian = Hessian(model, DataLoss(model, F.cross_entropy, data), gauss_newton=gauss_newton)
    expected = exact_gauss_newton(model, data) if gauss_newton else exact(model, data)
    vectors = random_rows(3, hessian.numel)
    torch.testing.assert_close(hessian.product(vectors), vectors @ expected, rtol=1e-9, atol=1e-11)


class Quotient(nn.Linear):
    """A linear layer with weights ``v * g / |v|``, the norm of each row or column."""

    def __init__(self, dim: int) -> None:
        super().__init__(SIZES[0], SIZES[1])
        self.dim, self.v = dim, self._parameters.pop("weight")
        self.g = nn.Parameter(torch.empty(SIZES[1], 1) if dim == 0 else torch.empty(1, SIZES[0]))
        self.v = self._parameters.pop("v")  # the order of torch's: bias, g, v

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.v * (self.g / self.v.norm(dim=1 - self.dim, keepdim=True)), self.bias)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("make", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_weight_norm(make: Callable[..., nn.Module], dim: int) -> None:
    """The second derivatives of torch's own operation are wrong: they take the norm as a constant."""
    torch.manual_seed(0)
    plain = nn.Sequential(Quotient(dim), nn.Tanh(), nn.Linear(SIZES[1], SIZES[2])).double()
    model, data = network(), batches()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        make(model[0], dim=dim)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()), plain.parameters())
    hessian, expected = Hessian(model, DataLoss(model, F.cross_entropy, data)), exact(plain, data)
    vectors = random_rows(3, hessian.numel)
    torch.testing.assert_close(hessian.product(vectors), vectors @ expected, rtol=1e-9, atol=1e-11)


def triple(grad: Tensor) -> Tensor:
    return 3 * grad


def test_hooks_do_not_change_second_derivatives():
    """A hook of a program would act on a gradient, and again on its derivative."""
    model, data = network(nn.Identity()), batches()
    expected = exact(model, data)
    model[0].weight.register_hook(triple)
    model[1].register_forward_hook(lambda *found: found[2].register_hook(triple) and None)
    model[3].register_full_backward_hook(lambda *found: tuple(map(triple, found[1])))
    model[3].register_full_backward_pre_hook(lambda *found: tuple(map(triple, found[1])))

    def slopes() -> list[Tensor]:
        return [*torch.autograd.grad(F.cross_entropy(model(data[0][0]), data[0][1]), list(model.parameters()))]

    before = slopes()
    for gauss_newton in (False, True):
        hessian = Hessian(model, DataLoss(model, F.cross_entropy, data), gauss_newton=gauss_newton)
        products = hessian.product(torch.eye(hessian.numel, dtype=torch.float64))
        torch.testing.assert_close(products, products.T, rtol=1e-9, atol=1e-11)
        if not gauss_newton:
            torch.testing.assert_close(products, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(slopes(), before, rtol=0, atol=0)  # they act again


def test_complex_parameters_are_refused():
    model = network()
    model.factor = nn.Parameter(torch.ones(1, dtype=torch.complex128))
    with pytest.raises(ValueError, match="a parameter is complex"):
        Hessian(model, DataLoss(model, F.cross_entropy, batches()))


class Square(torch.autograd.Function):
    """x^2, in the ways in which programs write its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


class OfNumpy(Square):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.from_numpy(2 * ctx.saved_tensors[0].detach().numpy() * grad.detach().numpy())


class Once(Square):
    backward = staticmethod(once_differentiable(Square.backward))


class Squared(nn.Module):
    """Outputs ``a x^2 + b w^2``: the parameter w gets a gradient by the function and another one by torch."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.function.apply(self.w) * x).sum(dim=1) + 3 * self.w.prod()


@pytest.mark.parametrize("loss_fn", [lambda outputs, _: outputs.mean(), lambda outputs, _: outputs.square().mean()])
@pytest.mark.parametrize("gauss_newton", [False, True])
def test_functions_of_a_program(gauss_newton: bool, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Autograd takes a second derivative that is missing for zero."""
    data, vectors = [(torch.ones(3, 2, dtype=torch.float64), torch.zeros(3))], torch.eye(2, dtype=torch.float64)
    plain = Squared(None)
    plain.forward = lambda x: (plain.w**2 * x).sum(dim=1) + 3 * plain.w.prod()  # type: ignore[method-assign]
    expected, found = (
        Hessian(model, DataLoss(model, loss_fn, data), gauss_newton=gauss_newton).product(vectors)
        for model in (plain, Squared(Square))
    )
    torch.testing.assert_close(found, expected)
    for function in (Once, OfNumpy):
        model = Squared(function)
        with pytest.raises(ValueError, match=f"{function.__name__} of the model has no second derivative"):
            Hessian(model, DataLoss(model, loss_fn, data), gauss_newton=gauss_newton).product(vectors)


def test_frozen_parameters_have_no_rows() -> None:
    model, data = network(), batches()
    model[0].bias.requires_grad_(False)
    hessian, expected = Hessian(model, DataLoss(model, F.cross_entropy, data)), exact(model, data)
    vectors = random_rows(2, hessian.numel)
    assert hessian.numel == len(expected) == sum(p.numel() for p in model.parameters()) - SIZES[1]
    torch.testing.assert_close(hessian.product(vectors), vectors @ expected, rtol=1e-10, atol=1e-12)


def test_gauss_newton() -> None:
    model, data = network(), batches()
    ours = Hessian(model, DataLoss(model, F.cross_entropy, data), gauss_newton=True)
    expected = exact_gauss_newton(model, data)
    vectors = random_rows(3, ours.numel)
    torch.testing.assert_close(ours.product(vectors), vectors @ expected, rtol=1e-9, atol=1e-11)
    ends = ours.eigenvalues(tolerance=1e-4).values
    wanted = torch.linalg.eigvalsh(expected)
    assert ends == pytest.approx([wanted[-1].item(), 0.0], abs=1e-4 * wanted[-1].item())


def test_both_ends_of_the_spectrum() -> None:
    model, data = network(), batches()
    hessian, expected = Hessian(model, DataLoss(model, F.cross_entropy, data)), exact(model, data)
    values, columns = torch.linalg.eigh(expected)
    found = hessian.eigenvalues(3, 2, tolerance=1e-9)
    wanted = [*values[-3:].flip(0).tolist(), values[1].item(), values[0].item()]
    assert found.values == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    assert wanted[-1] < 0 < wanted[0], "an indefinite matrix, or this test compares nothing"
    assert (found.residuals < 1e-6).all()
    alignment = (found.vectors[0] @ columns[:, -1]).abs()
    assert alignment == pytest.approx(1.0, abs=1e-6)
    only = hessian.eigenvalues(0, 1, tolerance=1e-9)
    assert only.values == pytest.approx(wanted[-1:], rel=1e-6)


def test_copies_of_an_eigenvalue_are_all_there() -> None:
    """Each output of a linear regression has the same Hessian: ten copies of each eigenvalue."""
    model = nn.Linear(40, 10, bias=False).double()
    inputs = torch.linalg.qr(torch.randn(200, 40, dtype=torch.float64))[0] * torch.linspace(4, 6, 40)
    inputs[:, 0] *= 3
    inputs[:, 1] /= 10
    data = DataLoss(model, F.mse_loss, [(inputs, torch.randn(200, 10, dtype=torch.float64))])
    largest = torch.linalg.eigvalsh(inputs.T @ inputs).flip(0) * 2 / 2000
    found = Hessian(model, data).eigenvalues(12, 3, tolerance=1e-6)
    torch.testing.assert_close(torch.from_numpy(found.values[:10]), largest[:1].expand(10))
    torch.testing.assert_close(torch.from_numpy(found.values[10:12]), largest[1:2].expand(2), rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.from_numpy(found.values[12:]), largest[-1:].expand(3), rtol=1e-4, atol=0)
    rows = found.vectors[:12]
    torch.testing.assert_close(rows @ rows.T, torch.eye(12, dtype=torch.float64), rtol=0, atol=1e-5)


def test_a_residual_says_how_good_an_eigenvalue_is() -> None:
    """With a loose tolerance the true eigenvalue lies within the residual."""
    model, data = network(), batches()
    hessian, expected = Hessian(model, DataLoss(model, F.cross_entropy, data)), exact(model, data)
    found = hessian.eigenvalues(1, 1, tolerance=0.3)
    apart = np.abs(torch.linalg.eigvalsh(expected).numpy()[None] - found.values[:, None]).min(axis=1)
    assert (apart <= found.residuals + 1e-12).all()


def matrix(num: int = 120) -> tuple[Tensor, Operator]:
    """A symmetric matrix with a few large eigenvalues, as Hessians have."""
    rotation = torch.linalg.qr(random_rows(num, num))[0]
    values = torch.cat([torch.tensor([40.0, 20.0, -10.0]), torch.linspace(-1, 1, num - 3)]).double()
    full = rotation * values @ rotation.T
    return full, Operator(product=lambda rows: rows @ full, like=full)


def of_a_network() -> tuple[Tensor, Operator]:
    """The exact Hessian of a network with 244 weights."""
    torch.manual_seed(0)
    full = exact(nn.Sequential(nn.Linear(SIZES[0], 20), nn.Tanh(), nn.Linear(20, SIZES[2])).double(), batches())
    return full, Operator(product=lambda rows: rows @ full, like=full)


@pytest.mark.parametrize("make", [matrix, of_a_network])
def test_trace_lies_in_its_interval(make: Callable[[], tuple[Tensor, Operator]]) -> None:
    """The interval is of 95 %: of 200 seeds, 190 are expected inside, and fewer than 180 have a chance of 0.1 %."""
    full, operator = make()
    inside = errors = 0.0
    for seed in range(200):
        found = trace(operator, 60, seed=seed)
        inside += found.low <= float(full.trace()) <= found.high
        errors += found.error / 200
    assert inside >= 180
    assert inside <= 199, "an interval that always holds the trace is too wide"
    assert errors < 5, "the large eigenvalues are found exactly, and only the small ones leave an error"


def test_trace_of_a_matrix_of_low_rank() -> None:
    """Nothing is left for the random vectors: the interval is that of rounding."""
    factor = random_rows(200, 5)
    full = factor @ factor.T
    operator = Operator(product=lambda rows: rows @ full, like=full)
    for seed in range(20):
        found = trace(operator, 60, seed=seed)
        assert found.low <= float(factor.square().sum()) <= found.high
        assert found.high - found.low < 1e-9


def test_trace_of_few_weights_is_exact() -> None:
    model, data = network(), batches()
    hessian = Hessian(model, DataLoss(model, F.cross_entropy, data))
    found = hessian.trace(hessian.numel)
    assert found.value == pytest.approx(float(exact(model, data).trace()), rel=1e-10)
    assert found.error == 0


def moments_of(density: SpectralDensity, power: int) -> np.ndarray:
    """The mean of ``lambda^power`` over all eigenvalues, by each probe."""
    return (density.weights * density.nodes**power).sum(axis=1)


def test_density_has_the_moments_of_the_matrix() -> None:
    """Quadrature with M nodes has the moments ``v^T H^p v`` of its probes without error for p < 2 M."""
    full, operator = matrix(40)
    found = spectral_density(operator, 3, 6, seed=5)
    generator = torch.Generator().manual_seed(5)
    probes = operator.directions(3, generator)
    powered = probes
    for power in range(12):
        moments = (probes * powered).sum(dim=1).numpy()
        assert moments_of(found, power) == pytest.approx(moments, rel=1e-8, abs=1e-8)
        powered = powered @ full
    assert found.weights.sum(axis=1) == pytest.approx(1.0)


def test_density_of_all_steps_has_the_eigenvalues() -> None:
    full, operator = matrix(40)
    found = spectral_density(operator, 1, 40, seed=0)
    assert np.sort(found.nodes[0]) == pytest.approx(torch.linalg.eigvalsh(full).numpy(), abs=1e-8)
    points = np.linspace(-60, 90, 3001)
    assert found.at(points, 2.0).sum() * (points[1] - points[0]) == pytest.approx(1.0, abs=1e-6)


def test_density_of_a_matrix_with_few_eigenvalues() -> None:
    """The iteration ends early: its Krylov space is complete after two steps."""
    operator = Operator(product=lambda rows: rows * scale, like=torch.zeros(50, dtype=torch.float64))
    scale = torch.tensor([2.0, -1.0], dtype=torch.float64).repeat(25)
    found = spectral_density(operator, 2, 20, seed=0)
    probes = operator.directions(2, torch.Generator().manual_seed(0))
    shares = probes[:, ::2].square().sum(dim=1).numpy()  # of the eigenvalue 2
    assert moments_of(found, 1) == pytest.approx(2 * shares - (1 - shares), abs=1e-10)
    assert moments_of(found, 2) == pytest.approx(4 * shares + (1 - shares), abs=1e-10)


@pytest.mark.parametrize("rows", [[(4, 5, 1.0)], [(0, 1, -3.0)], [(0, 1, 1.0), (7, 8, -2.0)]])
def test_no_probe_misses_what_signs_cannot_see(rows):
    """A sum of ``c (w_i - w_j)^2``: vectors of signs lie in its null space with one chance in two for each term."""
    full = torch.zeros(40, 40, dtype=torch.float64)
    for i, j, scale in rows:
        difference = torch.zeros(40, dtype=torch.float64)
        difference[i], difference[j] = 1.0, -1.0
        full += 2 * scale * torch.outer(difference, difference)
    operator = Operator(product=lambda vectors: vectors @ full, like=full)
    expected = torch.linalg.eigvalsh(full).numpy()
    for seed in range(20):
        found = extreme_eigenvalues(operator, 1, 1, seed=seed, tolerance=1e-8, max_products=200)
        assert found.values == pytest.approx([expected[-1], expected[0]], abs=1e-6), seed
        assert float(found.residuals.max()) < 1e-5, seed
        estimate = trace(operator, 6, seed=seed)
        assert estimate.value == pytest.approx(float(full.trace()), abs=1e-8), seed
        first, second = moments_of(spectral_density(operator, 2, 5, seed=seed), 2)
        assert first > 0 and second > 0 and first != second, seed


class Kept:
    """Everything that a call must leave as it was."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.before = model, self.state(model)

    @staticmethod
    def state(model: nn.Module) -> list[Any]:
        tensors = [(t.clone(), t.data_ptr()) for t in [*model.parameters(), *model.buffers()]]
        return [tensors, [m.training for m in model.modules()], torch.get_rng_state(), np.random.get_state()[1].copy()]

    def check(self) -> None:
        now = self.state(self.model)
        for (value, pointer), (old, address) in zip(now[0], self.before[0], strict=True):
            assert torch.equal(value, old)
            assert pointer == address
        assert now[1] == self.before[1]
        assert torch.equal(now[2], self.before[2])
        assert (now[3] == self.before[3]).all()
        assert all(parameter.grad is None for parameter in self.model.parameters())


def calls(hessian: Hessian) -> list[Callable[[], Any]]:
    return [
        lambda: hessian.product(torch.ones(hessian.numel)),
        lambda: hessian.eigenvalues(tolerance=0.1),
        lambda: hessian.trace(6),
        lambda: hessian.density(2, 3),
    ]


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("raised", [None, RuntimeError, KeyboardInterrupt])
def test_everything_is_as_before(which: int, raised: type[BaseException] | None) -> None:
    """Also after an error or Ctrl-C in the middle: batch norm and dropout in training mode."""
    model, data = network(nn.BatchNorm1d(SIZES[1]), nn.Dropout(0.3)), batches()
    model.train()
    num_calls = 0

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        if raised is not None and num_calls == 2:
            raise raised("stop")
        return F.cross_entropy(outputs, labels)

    hessian, kept = Hessian(model, DataLoss(model, loss, data)), Kept(model)
    if raised is None:
        calls(hessian)[which]()
    else:
        with pytest.raises(raised, match="stop"):
            calls(hessian)[which]()
    assert num_calls >= 2
    kept.check()


def test_dropout_draws_the_same_numbers_each_time() -> None:
    model = network(nn.Dropout(0.5)).train()
    hessian = Hessian(model, DataLoss(model, F.cross_entropy, batches()))
    vector = random_rows(1, hessian.numel)[0]
    assert torch.equal(hessian.product(vector), hessian.product(vector))


def test_gauss_newton_of_a_loss_that_is_linear_in_the_outputs() -> None:
    """Its second derivative is zero, and so is the matrix; the Hessian is not."""
    model, data = network(), [(inputs, labels.double()) for inputs, labels in batches()]
    loss = DataLoss(model, lambda outputs, labels: (outputs.sum(1) * labels).mean(), data)
    vectors = random_rows(2, Hessian(model, loss).numel)
    assert not Hessian(model, loss, gauss_newton=True).product(vectors).any()
    assert Hessian(model, loss).product(vectors).any()


def test_loss_without_curvature() -> None:
    model = nn.Linear(40, 1, bias=False)
    inputs = torch.randn(5, 40)
    hessian = Hessian(model, lambda: model(inputs).mean())
    found = hessian.eigenvalues()
    assert found.values.tolist() == [0.0, 0.0]
    assert hessian.trace(6).value == 0


def test_nan_is_one_clear_error() -> None:
    model, data = network(), batches()
    data[1][0][0, 0] = float("nan")
    hessian, kept = Hessian(model, DataLoss(model, F.cross_entropy, data)), Kept(model)
    for call in calls(hessian)[1:]:
        with pytest.raises(ValueError, match="not finite: check the data"):
            call()
    kept.check()


def once() -> Iterator[tuple[Tensor, Tensor]]:
    yield from batches()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m: Hessian(nn.ReLU(), lambda: torch.ones(())), "no parameter"),
        (lambda m: Hessian(m, lambda: m(batches()[0][0])).product(torch.ones(112)), "one number with a graph"),
        (lambda m: Hessian(m, DataLoss(m, F.cross_entropy, batches())).product(torch.ones(5)), r"shape \[5\]"),
        (lambda m: Hessian(m, DataLoss(m, F.cross_entropy, [])), "holds no sample"),
        (lambda m: Hessian(m, DataLoss(m, F.cross_entropy, once())).trace(6), "and now 0"),
        (lambda m: Hessian(m, lambda: m(batches()[0][0]).mean(), gauss_newton=True), "pass loss=DataLoss"),
        (lambda m: Hessian(m, DataLoss(m, F.cross_entropy, batches())).trace(2), "num_products is 2"),
        (lambda m: Hessian(m, DataLoss(m, F.cross_entropy, batches())).eigenvalues(0, 0), "at least 1"),
    ],
)  # fmt: skip
def test_refused(make: Callable[[nn.Module], Any], text: str) -> None:
    model = network()
    assert sum(parameter.numel() for parameter in model.parameters()) == 112
    with pytest.raises(ValueError, match=text):
        make(model)


def test_no_convergence_says_what_to_do() -> None:
    model = network()
    hessian = Hessian(model, DataLoss(model, F.cross_entropy, batches()))
    with pytest.raises(RuntimeError, match="did not converge within 3 products"):
        hessian.eigenvalues(max_products=3, tolerance=1e-12)
