"""How much a product of mixing matrices shrinks what differs from the mean.

D = W - J / n, J all ones, is what W does to differences: the mean is taken out. Its norm is the second singular value
of a doubly stochastic W. Where only columns sum to one, its spectral radius is the modulus of W's second eigenvalue:
the vectors of all eigenvalues but 1 sum to zero, since (1, ..., 1) W = (1, ..., 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.sparse import csc_array, csr_array
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, eigsh, svds

from ddpcore.topology.rounds import TOLERANCE, sums

Vector = npt.NDArray[np.float64]

MAX_DENSE = 512  # learners up to which a dense matrix is the simplest and quickest
_OUTSIDE = 1e-6  # how far above 1 a shift lies: it is no eigenvalue, and so W less the shift can be inverted
_ROUGH = 1e-4  # tolerance of a first guess


def is_doubly_stochastic(mixing: csr_array) -> bool:
    """Whether rows and columns sum to one."""
    return all(bool((abs(found - 1) <= TOLERANCE).all()) for found in sums(mixing))


def is_symmetric(mixing: csr_array) -> bool:
    """Whether j gives to k what k gives to j."""
    return bool(abs(mixing - mixing.T).max() <= TOLERANCE)


def grid_eigenvalues(row: Vector) -> npt.NDArray[np.complex128]:
    """All eigenvalues of the convolution whose row 0, as a grid, is given."""
    return np.fft.fftn(row).ravel()


def contraction_on_grid(rows: Sequence[Vector]) -> float:
    """The norm of D for a product of convolutions, which commute and are normal."""
    product = np.ones(rows[0].size, dtype=np.complex128)
    for row in rows:
        product *= grid_eigenvalues(row)
    return float(abs(product[1:]).max())


def contraction(matrices: Sequence[csr_array]) -> float:
    """The norm of D of the product W_{T-1} ... W_0, or its spectral radius where only columns sum to one.

    RuntimeError where Lanczos iteration does not converge.
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
        return 0.0  # the exact mean, which leaves no direction to iterate in
    if len(matrices) == 1 and balanced and is_symmetric(matrices[0]):
        return max(extreme_eigenvalue(matrices[0], "LA"), -extreme_eigenvalue(matrices[0], "SA"))
    if balanced:
        return _converged(lambda: svds(operator, k=1, v0=start, return_singular_vectors=False))
    return _converged(lambda: abs(eigs(operator, k=1, v0=start, return_eigenvectors=False)))


def extreme_eigenvalue(mixing: csr_array, which: str) -> float:
    """The smallest eigenvalue (SA) of a symmetric W, or the largest (LA) beside that of the mean.

    Lanczos iteration is slow where eigenvalues crowd at the end, as those of long paths do. Such graphs fall apart at
    few edges, so that W less a shift is cheap to invert, and in the inverse the crowd near the shift is far apart.
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
        if which == "SA":  # what iteration finds lies inside the spectrum, by the tolerance at most
            shift = _converged(lambda: eigsh(mixing, k=1, which="SA", v0=start, tol=_ROUGH, return_eigenvectors=False))
            shift -= 2 * _ROUGH
        # Of the two nearest the lesser one: the other is 1, or the last but one. The error is 1e-8 of their distance.
        nearest = eigsh(csc_array(mixing), k=2, sigma=shift, v0=start, tol=1e-8, return_eigenvectors=False)
        return float(nearest.min())


def _start(num_learners: int) -> Vector:
    """The same numbers at every call, with a share in every direction."""
    return np.random.default_rng(0).standard_normal(num_learners)


def _deviation(matrices: Sequence[csr_array]) -> LinearOperator:
    """D of the product, as a function."""
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
