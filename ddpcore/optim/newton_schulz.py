"""The orthogonal factor of matrices by Newton-Schulz iterations, and the division of this work among ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Jordan et al. 2024 (kellerjordan.github.io/posts/muon): singular values end between 0.7 and 1.2, not at 1."""


def direct_products(rows: int, columns: int, steps: int) -> int:
    """Multiplications of the direct form for a matrix with ``rows <= columns``."""
    return steps * (2 * rows * rows * columns + rows**3)


def gram_products(rows: int, columns: int, steps: int) -> int:
    """Multiplications of the Gram form, which has two products with the wide matrix instead of two a step."""
    return 2 * rows * rows * columns + max(4 * steps - 3, 0) * rows**3


def takes_gram(rows: int, columns: int, steps: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the Gram form has fewer multiplications. In 16 bits its powers of the Gram matrix are too inexact."""
    if steps == 0 or gram_products(rows, columns, steps) >= direct_products(rows, columns, steps):
        return False
    if dtype == torch.float32 and device.type == "cpu":  # where a program may ask torch for factors in bfloat16
        return bool(torch.backends.mkldnn.matmul.fp32_precision != "bf16")  # type: ignore[attr-defined]
    return dtype in (torch.float32, torch.float64)


def orthogonalize(
    matrices: Tensor, *, steps: int, coefficients: Sequence[float], eps: float, dtype: torch.dtype
) -> Tensor:
    """Newton-Schulz iterations ``X <- a*X + (b*A + c*A^2) X`` with ``A = X X^T``, from ``X = G/max(|G|, eps)``.

    They move all singular values of G towards 1 and keep its singular vectors. All matrices are one batch.

    The Gram form iterates on A, which is small if the matrices are wide: ``P = a*I + b*A + c*A^2``, ``Q <- P Q``,
    ``A <- P A P``, and at the end ``X <- Q X``. It is the same iteration, with other rounding.

    Args:
        matrices: G, ``[batch, rows, columns]`` with ``rows <= columns``. Not changed.
        steps: number of iterations.
        coefficients: a, b, c.
        eps: the least divisor.
        dtype: of the products, and of the result ``[batch, rows, columns]``.
    """
    with torch.autocast(matrices.device.type, enabled=False):
        x = matrices.to(dtype)
        x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
        a, b, c = coefficients
        if takes_gram(x.shape[1], x.shape[2], steps, dtype, x.device):
            return _by_gram(x, steps, a, b, c)
        for _ in range(steps):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x


def _by_gram(x: Tensor, steps: int, a: float, b: float, c: float) -> Tensor:
    gram, total = x @ x.mT, None
    for step in range(steps):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        total = factor if total is None else factor @ total
        if step + 1 < steps:
            gram = factor @ (gram @ factor)
    return x if total is None else total @ x


def owners_of(costs: Sequence[int], num_ranks: int) -> list[int]:
    """The rank that computes each item: the costliest items first, each to the rank with the least work so far."""
    work, owners = [0] * num_ranks, [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        owners[item] = min(range(num_ranks), key=lambda rank: (work[rank], rank))
        work[owners[item]] += costs[item]
    return owners
