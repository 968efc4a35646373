"""Means of rows, sums of squares of the tensors of a list, and inner products of rows, which noise statistics take."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ddpcore.ops import reference
from ddpcore.ops.library import KERNEL_DTYPES, define, no_result, note_writes, without_derivative

_average = define(
    "average_(Tensor(a!)[] rows, int size) -> Tensor",
    reference.average_,
    lambda rows, size: rows[0].new_empty((sum(len(one) if one.dim() > 1 else 1 for one in rows),), dtype=torch.float64),
)
_segment_norms = define(
    "segment_norms(Tensor[] tensors) -> Tensor",
    reference.segment_norms,
    lambda tensors: tensors[0].new_empty((len(tensors),), dtype=torch.float64),
)
_total_norm = define("total_norm_(Tensor[] tensors, Tensor(a!) out) -> ()", reference.total_norm_, no_result)
_noise_sums = define(
    "noise_sums(Tensor[] rows, int[] bounds, Tensor? origin) -> Tensor",
    reference.noise_sums,
    lambda rows, bounds, origin: rows[0].new_empty((len(bounds) - 1, len(rows), len(rows)), dtype=torch.float64),
)


def average_(rows: Sequence[Tensor], size: int) -> Tensor:
    """Overwrite each ``size`` consecutive rows with their mean: added in ascending order, then divided, in one pass.

    Returns the sum of each row before, float64 ``[number of rows]``: not finite if a number of the row is not. 16 bits
    are added in float32. Dtypes without a kernel, and means of more than 1024 rows on CUDA, take the reference.

    Args:
        rows: tensors ``[P]``, one row, or ``[n, P]``, n rows, which may be apart. All are contiguous, of one dtype and
            device, and do not overlap. Else RuntimeError, as for a size that does not divide their number.
        size: rows of a mean.
    """
    has_kernel = rows[0].dtype in KERNEL_DTYPES and not (rows[0].is_cuda and size > 1024)
    note_writes("average_", rows)
    torch.autograd.graph.increment_version(rows)
    with torch.no_grad():
        return (_average if has_kernel else reference.average_)(rows, size)


def segment_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The squared 2-norm of every tensor, summed in float64 in one fixed order.

    The order is relative to the start of each tensor. So a list of tensors and the views of a flat buffer give the same
    bits, for any number of threads. The result is float64 ``[len(tensors)]``.

    Args:
        tensors: at least one, else RuntimeError; float32, bfloat16 or float16 of one dtype and device, dense.
    """
    return without_derivative("segment_norms", _segment_norms(tensors))


def total_norm_(tensors: Sequence[Tensor], out: Tensor) -> None:
    """The squared 2-norm of all tensors together, summed in the order of ``segment_norms``, without an allocation.

    Args:
        tensors: as in :func:`segment_norms`.
        out: float64 on their device, at least ``1 + num_blocks(tensors)`` elements; ``out[0]`` receives the result.
    """
    note_writes("total_norm_", [out])
    _total_norm(tensors, out)


def noise_sums(rows: Sequence[Tensor], bounds: Sequence[int], origin: Tensor | None = None) -> Tensor:
    """The inner products ``(x_i - o) . (x_j - o)`` of all pairs of rows, for each segment, in one pass.

    Differences are rounded to fp32. Products are exact and are added in float64 in one fixed order, so the bits do not
    depend on the number of threads. If one of the rows is the origin, small distances between large rows stay precise.

    On CUDA GPUs with slow float64, such as T4 and RTX 4090, each thread adds its 16 products in a pair of fp32 numbers,
    and float64 adds the threads. The error of the pairs is at most 2^-40 of the sum of the magnitudes, plus 2^-50 of
    the product of the largest values.

    Args:
        rows: at least one, contiguous ``[P]``; float32, bfloat16 or float16 of one dtype and device.
        bounds: ascending from 0 to P: segment s has the columns from ``bounds[s]`` to ``bounds[s + 1]``.
        origin: o, with the shape and dtype of a row; None is zero.

    Returns float64 ``[S, K, K]``, symmetric: K rows, S segments; zeros for an empty segment. RuntimeError: rows or
    bounds are invalid. On CUDA a call takes up to 256 rows.
    """
    return without_derivative("noise_sums", _noise_sums(rows, bounds, origin))
