"""How much a product of mixing matrices reduces the distance from the mean.

D = W - J / n, with J all ones, is the effect of W on deviations from the mean. If W is doubly stochastic, the norm of D
is the second singular value of W. If only columns sum to one, the spectral radius of D is the modulus of W's second
eigenvalue: the eigenvectors of all eigenvalues but 1 sum to zero, because (1, ..., 1) W = (1, ..., 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import numpy.typing as npt

from ddpcore.topology.rounds import TOLERANCE, MixingMatrix, Vector


def is_doubly_stochastic(mixing: MixingMatrix) -> bool:
    """Whether rows and columns sum to one."""
    return all(bool((abs(found - 1) <= TOLERANCE).all()) for found in mixing.sums())


def is_symmetric(mixing: MixingMatrix) -> bool:
    """Whether W is symmetric."""
    rows, columns, num_learners = mixing.rows, mixing.columns, mixing.num_learners
    places = rows * num_learners + columns  # one number for each entry
    order = np.argsort(places)
    found = order[np.searchsorted(places, columns * num_learners + rows, sorter=order).clip(max=len(order) - 1)]
    is_opposite = (rows[found] == columns) & (columns[found] == rows)
    return bool(abs(mixing.values - np.where(is_opposite, mixing.values[found], 0.0)).max() <= TOLERANCE)


def grid_eigenvalues(rows: Sequence[Vector]) -> npt.NDArray[np.complex128]:
    """All eigenvalues of the product of convolutions whose rows 0 are these grids. The first one is 1, of the mean."""
    product = np.ones(rows[0].size, dtype=np.complex128)
    for row in rows:
        product *= np.fft.fftn(row).ravel()
    return product


def contraction(matrices: Sequence[MixingMatrix]) -> float:
    """The norm of D of the product W_{T-1} ... W_0, or its spectral radius if only columns sum to one."""
    balanced = all(map(is_doubly_stochastic, matrices))
    product = np.eye(matrices[0].num_learners)
    for mixing in matrices:
        product = mixing.dense() @ product
    deviation = product - 1 / len(product)
    return float(np.linalg.norm(deviation, 2) if balanced else abs(np.linalg.eigvals(deviation)).max())


def weighted_gap(matrices: Sequence[Vector], weights: Vector, *, is_random: bool) -> float:
    """The gap of averages that keep a weighted mean, with distances that are weighted as the mean.

    With p the weights and r = p^(1/2), S = diag(r) W diag(r)^(-1) is symmetric if W is self-adjoint for p, and
    D = S - r r^T. ``is_random``: the mean of S^T S over these matrices stands for the expected one.
    """
    root = np.sqrt(weights / weights.sum())
    scaled = [root[:, None] * mixing / root for mixing in matrices]
    if is_random:
        square = sum(one.T @ one for one in scaled) / len(scaled)
        return min(1.0, 1.0 - float(np.linalg.eigvalsh(square - np.outer(root, root))[-1]))
    product = reduce(np.matmul, reversed(scaled))
    shrunk = float(np.linalg.norm(product - np.outer(root, root), 2))
    return max(0.0, 1.0 - shrunk ** (1 / len(matrices)))
