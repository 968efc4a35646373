"""The spectrum of mixing matrices of many learners, by the Lanczos iteration of scipy; see ``spectrum.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ddpcore.options.extras import extra

with extra("train"):
    from scipy.sparse import csc_array, csr_array
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, eigsh, svds

Vector = npt.NDArray[np.float64]

_OUTSIDE = 1e-6  # how far a shift is above 1: it is no eigenvalue, so W minus the shift can be inverted
_ROUGH = 1e-4  # tolerance of a first estimate


def contraction(matrices: Sequence[csr_array], balanced: bool, symmetric: bool) -> float:
    """The norm of D of the product W_{T-1} ... W_0, or its spectral radius if only columns sum to one.

    Args:
        matrices: of a period.
        balanced: whether rows and columns of all sum to one.
        symmetric: whether there is one matrix, balanced and symmetric.

    Raises:
        RuntimeError: the iteration does not converge.
    """
    num_learners = matrices[0].shape[0]
    operator, start = _deviation(matrices), _start(num_learners)
    if np.linalg.norm(operator @ start) <= num_learners * np.finfo(np.float64).eps * np.linalg.norm(start):
        return 0.0  # the product is the exact mean: the iteration has no start vector
    if symmetric:
        return max(extreme_eigenvalue(matrices[0], "LA"), -extreme_eigenvalue(matrices[0], "SA"))
    if balanced:
        return _converged(lambda: svds(operator, k=1, v0=start, return_singular_vectors=False))
    return _converged(lambda: abs(eigs(operator, k=1, v0=start, return_eigenvectors=False)))


def extreme_eigenvalue(mixing: csr_array, which: str) -> float:
    """The smallest eigenvalue (SA) of a symmetric W, or the largest (LA) except the mean's.

    The Lanczos iteration is slow if eigenvalues are dense at the end of the spectrum, as for long paths. Such graphs
    have small separators, so W minus a shift is cheap to factorize, and its inverse separates the eigenvalues near the
    shift.
    """
    num_learners = mixing.shape[0]
    start = _start(num_learners)
    if which == "LA":
        start -= start.mean()
    operator = mixing if which == "SA" else _deviation([mixing])
    try:
        return float(eigsh(operator, k=1, which=which, v0=start, maxiter=100, return_eigenvectors=False)[0])
    except ArpackNoConvergence:
        shift = 1 + _OUTSIDE
        if which == "SA":  # the estimate lies inside the spectrum, at a distance of at most the tolerance
            shift = _converged(lambda: eigsh(mixing, k=1, which="SA", v0=start, tol=_ROUGH, return_eigenvectors=False))
            shift -= 2 * _ROUGH
        # The smaller of the two nearest: the other is 1, or the last but one. The error is 1e-8 of their distance.
        nearest = eigsh(csc_array(mixing), k=2, sigma=shift, v0=start, tol=1e-8, return_eigenvectors=False)
        return float(nearest.min())


def _start(num_learners: int) -> Vector:
    """A fixed random start vector, which has a component in every direction."""
    return np.random.default_rng(0).standard_normal(num_learners)


def _deviation(matrices: Sequence[csr_array]) -> LinearOperator:
    """D of the product, as a linear operator."""
    num_learners = matrices[0].shape[0]

    def forward(vector: Vector) -> Vector:
        mixed = vector
        for mixing in matrices:
            mixed = mixing @ mixed
        return mixed - vector.mean()

    def backward(vector: Vector) -> Vector:
        mixed = vector
        for mixing in reversed(matrices):
            mixed = mixing.T @ mixed
        return mixed - vector.mean()

    return LinearOperator((num_learners, num_learners), matvec=forward, rmatvec=backward, dtype=np.float64)


def _converged(iterate: Callable[[], Vector]) -> float:
    try:
        return float(np.max(iterate()))
    except ArpackNoConvergence:
        raise RuntimeError(
            "the spectral gap is too small to be found by iteration: these rounds hardly mix, add edges"
        ) from None
