"""Eigenvalues, trace and spectral density of a symmetric operator that is known by its products with vectors.

Shapes: P elements of a vector, K vectors of a product, M steps of a Lanczos iteration.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddpcore.options.extras import extra

Array = npt.NDArray[np.float64]
DENSE = 32  # operators with at most so many rows are computed whole
RADIUS_STEPS = 8  # Lanczos steps for a rough spectral radius


class NotFinite(ValueError):
    """A product has NaN or Inf."""


class NotConverged(RuntimeError):
    """An iteration did not end within its number of products."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A symmetric matrix ``[P, P]``."""

    product: Callable[[Tensor], Tensor]  #: returns the products ``[K, P]`` of vectors ``[K, P]``
    like: Tensor  #: a vector ``[P]`` with the dtype and device of the others

    @property
    def numel(self) -> int:
        """P."""
        return len(self.like)

    def __call__(self, vectors_KP: Tensor) -> Tensor:
        """The products. NotFinite: one has NaN or Inf."""
        products_KP = self.product(vectors_KP)
        if not bool(products_KP.isfinite().all()):
            raise NotFinite("a Hessian-vector product is not finite: check the data and the weights for NaN and Inf")
        return products_KP

    def directions(self, num: int, generator: torch.Generator) -> Tensor:
        """Random unit vectors ``[num, P]``. None lies in the null space of a matrix that is not zero, as signs may."""
        draws = torch.randn(num, self.numel, generator=generator, dtype=torch.float64, device="cpu")
        return (draws / draws.norm(dim=1, keepdim=True)).to(self.like)

    def dense(self) -> Array:
        """The whole matrix."""
        rows = self(torch.eye(self.numel, dtype=self.like.dtype, device=self.like.device)).double().cpu().numpy()
        return (rows + rows.T) / 2


@dataclass(frozen=True, kw_only=True)
class Eigenvalues:
    """Some eigenvalues of a symmetric operator H."""

    values: Array  #: ``[k]``, descending
    #: ``[k]``, ``|H v - lambda v|`` of the unit vectors v below. An eigenvalue of H is at most so far away.
    residuals: Array
    vectors: Tensor  #: the unit eigenvectors, ``[k, P]``, with the dtype and device of the operator


def extreme_eigenvalues(
    operator: Operator, largest: int, smallest: int, *, seed: int, tolerance: float, max_products: int
) -> Eigenvalues:
    """The eigenvalues at both ends of the spectrum, each by a Lanczos iteration (ARPACK). NotFinite or NotConverged.

    ARPACK's tolerance is relative to the eigenvalue, which is too strict near zero, and no smaller than a number. So
    each end is computed of H by its spectral radius, plus or minus 2, which makes the tolerance relative to that
    radius, and is never zero, for which ARPACK has no start vector.
    """
    num = operator.numel
    if num <= max(DENSE, 2 * (largest + smallest)):
        values, columns = np.linalg.eigh(operator.dense())
        chosen = [*range(num - 1, num - 1 - largest, -1), *range(smallest - 1, -1, -1)]
        values, rows = values[chosen], columns.T[chosen]
    else:
        radius = float(abs(spectral_density(operator, 1, RADIUS_STEPS, seed=seed).nodes).max())
        tops, rows = _arpack(operator, largest, radius, seed, tolerance, max_products)
        bottoms, more = _arpack(operator, smallest, -radius, seed, tolerance, max_products)
        values, rows = np.concatenate([tops, bottoms]), np.concatenate([rows, more])
    vectors_KP = torch.from_numpy(np.ascontiguousarray(rows)).to(operator.like)
    residuals = operator(vectors_KP).double().cpu().numpy() - values[:, None] * rows
    return Eigenvalues(values=values, residuals=np.linalg.norm(residuals, axis=1), vectors=vectors_KP)


def _arpack(
    operator: Operator, k: int, shift: float, seed: int, tolerance: float, max_products: int
) -> tuple[Array, Array]:
    """The ``k`` largest eigenvalues (smallest, if the shift is negative), descending, and their vectors ``[k, P]``.

    One start vector finds one vector of each eigenvalue. So if ``k`` is above 1, further iterations without what was
    found look for copies, until there is none among the ``k``.
    """
    if k == 0 or shift == 0:  # a zero operator, for which ARPACK has no start vector
        return np.zeros(k), np.eye(k, operator.numel)
    nothing = np.zeros(0), np.zeros((0, operator.numel))
    if k == 1:  # a stricter iteration, because the eigenvalue at an end may come after one that lies near it
        with suppress(NotConverged):
            return _lanczos(operator, 1, shift, *nothing, seed, tolerance / 7, max_products)
    values, rows = _lanczos(operator, k, shift, *nothing, seed, tolerance, max_products)
    while k > 1:
        value, row = _lanczos(operator, 1, shift, values, rows, seed + 1, tolerance, max_products)
        if (value[0] - values[-1] if shift > 0 else values[0] - value[0]) <= tolerance * abs(shift):
            break
        values, rows = np.concatenate([values, value]), np.concatenate([rows, row])
        order = np.argsort(values)[::-1]
        order = order[:k] if shift > 0 else order[1:]
        values, rows = values[order], rows[order]
    return values, rows


def _lanczos(
    operator: Operator, k: int, shift: float, known: Array, known_rows: Array, seed: int, tolerance: float,
    max_products: int,
) -> tuple[Array, Array]:  # fmt: skip
    """As :func:`_arpack`, of the operator without the known eigenvalues and vectors ``[., P]``; one start vector."""
    scale, side = abs(shift), 2 * np.sign(shift)
    start = np.random.Generator(np.random.PCG64(seed)).standard_normal(operator.numel)
    num_products = count(1)
    why = f"within {max_products} products: eigenvalues at that end lie close to each other"
    advice = "ask for fewer, or pass a larger tolerance or max_products"
    failure = NotConverged(f"the Lanczos iteration did not converge {why}, so {advice}")

    def matvec(vector: Array) -> Array:
        if next(num_products) > max_products:
            raise failure
        row = torch.from_numpy(vector.reshape(1, -1)).to(operator.like)
        shifted = operator(row)[0].double().cpu().numpy() / scale + side * vector.reshape(-1)
        return np.asarray(shifted - known_rows.T @ ((known / scale + side) * (known_rows @ vector.reshape(-1))))

    with extra("train"):
        from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh  # noqa: PLC0415
    try:
        shifted = LinearOperator((operator.numel, operator.numel), matvec=matvec, dtype=np.float64)
        values, columns = eigsh(shifted, k=k, which="LA" if shift > 0 else "SA", v0=start, tol=tolerance * 2 / 3)
    except ArpackNoConvergence:
        raise failure from None
    order = np.argsort(values)[::-1]
    return (values[order] - side) * scale, columns.T[order]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimate with its error, and the interval of 95 % by Student's t distribution."""

    value: float
    error: float  #: the standard error; 0 if the value is exact
    low: float
    high: float


def trace(operator: Operator, num_products: int, *, seed: int) -> Estimate:
    """The trace by Hutch++ (Meyer et al. 2021, algorithm 1): a third of the products finds a basis Q of the directions
    in which H is large, a third gives tr Q^T H Q exactly, and a third estimates the rest by random vectors.

    At most P products: then the trace is exact.
    """
    third = num_products // 3
    if operator.numel <= max(DENSE, num_products):
        exact = float(np.trace(operator.dense()))
        return Estimate(value=exact, error=0.0, low=exact, high=exact)
    generator = torch.Generator().manual_seed(seed)
    basis_PK = torch.linalg.qr(operator(operator.directions(third, generator)).double().T).Q
    found = operator(basis_PK.T.to(operator.like)).double()
    largest = float((found * basis_PK.T).sum())
    signs_KP = torch.randint(2, (third, operator.numel), generator=generator, device="cpu") * 2.0 - 1
    probes_KP = signs_KP.to(operator.like).double()
    probes_KP = (probes_KP - (probes_KP @ basis_PK) @ basis_PK.T).to(operator.like)
    rest = (operator(probes_KP).double() * probes_KP.double()).sum(dim=1)
    rounding = torch.finfo(operator.like.dtype).eps * operator.numel**0.5 * float(found.norm(dim=1).sum())
    draws = rest.cpu().numpy()
    value, error = largest + float(draws.mean()), float(draws.std(ddof=1) / len(draws) ** 0.5)
    with extra("train"):
        from scipy.stats import t  # noqa: PLC0415
    width = float(t.ppf(0.975, len(draws) - 1)) * error + rounding
    return Estimate(value=value, error=error, low=value - width, high=value + width)


@dataclass(frozen=True, kw_only=True)
class SpectralDensity:
    """The density of the eigenvalues, by stochastic Lanczos quadrature (Ubaru, Chen, Saad 2017)."""

    nodes: Array  #: ``[probes, M]``: eigenvalues of each probe's tridiagonal matrix
    weights: Array  #: ``[probes, M]``: the share of all eigenvalues near each node. A row adds up to 1.

    def at(self, points: Array, width: float) -> Array:
        """The density at some points ``[n]``, with each node as a Gaussian of standard deviation ``width``."""
        apart = (np.asarray(points, dtype=np.float64)[:, None] - self.nodes.reshape(1, -1)) / width
        kernel = np.exp(-0.5 * apart**2) / (width * np.sqrt(2 * np.pi))
        return np.asarray(kernel @ self.weights.reshape(-1) / len(self.weights))


def spectral_density(operator: Operator, num: int, steps: int, *, seed: int) -> SpectralDensity:
    """The density from ``num`` random vectors, each with ``steps`` Lanczos steps, all orthogonalized again.

    It keeps ``num * steps`` vectors of P elements.
    """
    with extra("train"):
        from scipy.linalg import eigh_tridiagonal  # noqa: PLC0415
    steps = min(steps, operator.numel)
    vectors_KP = operator.directions(num, torch.Generator().manual_seed(seed))
    basis: Any = []  # of tensors [K, P]
    diagonal, beside = np.zeros((num, steps)), np.zeros((num, steps - 1))  # of the Lanczos matrices
    for step in range(steps):
        basis.append(vectors_KP)
        next_KP = operator(vectors_KP)
        diagonal[:, step] = (next_KP.double() * vectors_KP.double()).sum(dim=1).cpu().numpy()
        if step == steps - 1:
            break
        for _ in range(2):  # twice is enough (Parlett)
            for known_KP in basis:
                next_KP = next_KP - known_KP * (known_KP * next_KP).sum(dim=1, keepdim=True)
        norms_K1 = next_KP.double().norm(dim=1, keepdim=True)  # squares of float32 have no room for small and large H
        beside[:, step] = norms_K1[:, 0].cpu().numpy()
        # A zero norm: the Krylov space is complete. Any direction may follow, with the weight zero.
        next_KP = next_KP / norms_K1.clamp(min=torch.finfo(torch.float64).tiny)
        vectors_KP = torch.where(norms_K1 > 0, next_KP, 0.0).to(operator.like)
    solve = partial(eigh_tridiagonal, lapack_driver="stev")  # stevd may fail
    nodes, columns = map(np.stack, zip(*map(solve, diagonal, beside), strict=True))
    return SpectralDensity(nodes=nodes, weights=columns[:, 0] ** 2)
