"""Arithmetic on scalars as the kernels do it, for the reference implementations."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def rounded(value: float, like: Tensor) -> float:
    """The factor in the precision of arithmetic on ``like``."""
    return value if like.dtype == torch.float64 else float(np.float32(value))


def power(base: float, exponent: int) -> float:
    """``base`` to a power that is not negative, by repeated squaring, as in the kernels, for the same bits."""
    result = 1.0
    while exponent > 0:
        if exponent % 2:
            result *= base
        base, exponent = base * base, exponent // 2
    return result


def clamped(value: float, low: float, high: float) -> float:
    """The value between two bounds. NaN stays NaN, unlike with ``min`` and ``max``."""
    if value < low:
        value = low
    return high if value > high else value


def norms(first: Tensor, second: Tensor, position: int, squares: Tensor | None, passes: str) -> tuple[float, float]:
    """The norms of two tensors. The second pass takes them from ``squares``, into which the first pass writes."""
    if passes == "second":
        assert squares is not None
        return math.sqrt(squares[position, 0]), math.sqrt(squares[position, 1])
    sums = first.double().square().sum(), second.double().square().sum()
    if squares is not None:
        squares[position] = torch.stack(sums)
    return math.sqrt(sums[0]), math.sqrt(sums[1])
