"""``segment_norms`` and ``total_norm_``: sums of squares of the tensors of a list."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddpcore.ops import reference
from ddpcore.ops.library import define, no_result


def _fake_segment_norms(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((len(tensors),), dtype=torch.float64)


_segment_norms = define("segment_norms(Tensor[] tensors) -> Tensor", reference.segment_norms, _fake_segment_norms)
_total_norm = define("total_norm_(Tensor[] tensors, Tensor(a!) out) -> ()", reference.total_norm_, no_result)


def segment_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The squared 2-norm of every tensor, summed in float64 in one fixed order.

    The order is relative to the start of each tensor. So a list of tensors and the views of a flat buffer give the same
    bits, for any number of threads.

    Args:
        tensors: at least one; float32, bfloat16 or float16 of one dtype and device, dense.

    Returns:
        float64 ``[len(tensors)]``: sums of squares. The norms are their square roots.

    Raises:
        RuntimeError: there are no tensors, or one is not valid.
    """
    return _segment_norms(tensors)


def total_norm_(tensors: Sequence[Tensor], out: Tensor) -> None:
    """The squared 2-norm of all tensors together, summed in the order of ``segment_norms``, without an allocation.

    Args:
        tensors: as in :func:`segment_norms`.
        out: float64 on their device, at least ``1 + num_blocks(tensors)`` elements; ``out[0]`` receives the result.

    Raises:
        RuntimeError: there are no tensors, or one is not valid.
    """
    _total_norm(tensors, out)
