"""How much a product of mixing matrices reduces the distance from the mean.

D = W - J / n, with J all ones, is the effect of W on deviations from the mean. If W is doubly stochastic, the norm of D
is the second singular value of W. If only columns sum to one, the spectral radius of D is the modulus of W's second
eigenvalue: the eigenvectors of all eigenvalues but 1 sum to zero, because (1, ..., 1) W = (1, ..., 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.sparse import csc_array, csr_array
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, eigsh, svds

from ddpcore.topology.rounds import TOLERANCE, sums

Vector = npt.NDArray[np.float64]

MAX_DENSE = 512  # most learners for which dense matrices are used: they are the fastest there
_OUTSIDE = 1e-6  # how far a shift is above 1: it is no eigenvalue, so W minus the shift can be inverted
_ROUGH = 1e-4  # tolerance of a first estimate


def is_doubly_stochastic(mixing: csr_array) -> bool:
    """Whether rows and columns sum to one."""
    return all(bool((abs(found - 1) <= TOLERANCE).all()) for found in sums(mixing))


def is_symmetric(mixing: csr_array) -> bool:
    """Whether W is symmetric."""
    return bool(abs(mixing - mixing.T).max() <= TOLERANCE)


def grid_eigenvalues(row: Vector) -> npt.NDArray[np.complex128]:
    """All eigenvalues of the convolution whose row 0 is this grid."""
    return np.fft.fftn(row).ravel()


def contraction_on_grid(rows: Sequence[Vector]) -> float:
    """The norm of D for a product of convolutions; they commute and are normal matrices."""
    product = np.ones(rows[0].size, dtype=np.complex128)
    for row in rows:
        product *= grid_eigenvalues(row)
    return float(abs(product[1:]).max())


def contraction(matrices: Sequence[csr_array]) -> float:
    """The norm of D of the product W_{T-1} ... W_0, or its spectral radius if only columns sum to one.

    RuntimeError if the Lanczos iteration does not converge.
    """
    num_learners = matrices[0].shape[0]
    balanced = all(map(is_doubly_stochastic, matrices))
    if num_learners <= MAX_DENSE:
        product = np.eye(num_learners)
        for mixing in matrices:
            product = mixing @ product
        deviation = product - 1 / num_learners
        return float(np.linalg.norm(deviation, 2) if balanced else abs(np.linalg.eigvals(deviation)).max())
    operator, start = _deviation(matrices), _start(num_learners)
    if np.linalg.norm(operator @ start) <= num_learners * np.finfo(np.float64).eps * np.linalg.norm(start):
        return 0.0  # the product is the exact mean: the iteration has no start vector
    if len(matrices) == 1 and balanced and is_symmetric(matrices[0]):
        return max(extreme_eigenvalue(matrices[0], "LA"), -extreme_eigenvalue(matrices[0], "SA"))
    if balanced:
        return _converged(lambda: svds(operator, k=1, v0=start, return_singular_vectors=False))
    return _converged(lambda: abs(eigs(operator, k=1, v0=start, return_eigenvectors=False)))


def extreme_eigenvalue(mixing: csr_array, which: str) -> float:
    """The smallest eigenvalue (SA) of a symmetric W, or the largest (LA) except that of the mean.

    The Lanczos iteration is slow if eigenvalues are dense at the end of the spectrum, as for long paths. Such graphs
    have small separators, so W minus a shift is cheap to factorize, and its inverse separates the eigenvalues near the
    shift.
    """
    num_learners = mixing.shape[0]
    if num_learners <= MAX_DENSE:
        return float(np.linalg.eigvalsh(mixing.toarray())[0 if which == "SA" else -2])
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
