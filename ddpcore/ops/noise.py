"""``noise_sums``: all inner products of a few long rows, which noise statistics are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddpcore.ops import reference
from ddpcore.ops.library import define


def _fake_noise_sums(rows: list[Tensor], bounds: list[int], origin: Tensor | None) -> Tensor:
    return rows[0].new_empty((len(bounds) - 1, len(rows), len(rows)), dtype=torch.float64)


_noise_sums = define(
    "noise_sums(Tensor[] rows, int[] bounds, Tensor? origin) -> Tensor", reference.noise_sums, _fake_noise_sums
)


def noise_sums(rows: Sequence[Tensor], bounds: Sequence[int], origin: Tensor | None = None) -> Tensor:
    """The inner products ``(x_i - o) . (x_j - o)`` of all rows, segment by segment, in one pass.

    Differences are rounded to fp32; products are exact, and summed in float64 in one fixed order, so the bits are the
    same for any number of threads. With one of the rows as the origin, distances that are tiny beside the rows keep
    their digits.

    Args:
        rows: at least one, contiguous ``[P]``; float32, bfloat16 or float16 of one dtype and device.
        bounds: ascending from 0 to P: segment s is the columns from ``bounds[s]`` to ``bounds[s + 1]``.
        origin: o, like a row; None is zero.

    Returns:
        float64 ``[S, K, K]``, symmetric: K rows, S segments; zeros where a segment is empty.

    Raises:
        RuntimeError: rows or bounds do not fit. On CUDA a call takes up to 256 rows.
    """
    return _noise_sums(rows, bounds, origin)
