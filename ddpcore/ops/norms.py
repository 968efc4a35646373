"""``segment_norms``: the sum of squares of each tensor of a list."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import library as library


def segment_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The squared 2-norm of every tensor, summed in float64 in one fixed order.

    The order is relative to the start of each tensor: a list and the views of a flat buffer give the same bits, with
    any number of threads.

    Args:
        tensors: at least one; float32, bfloat16 or float16 of one dtype and device, dense.

    Returns:
        float64 ``[len(tensors)]``: sums of squares; take the root for norms.

    Raises:
        RuntimeError: no tensors, or tensors that do not fit.
    """
    return torch.ops.ddpcore.segment_norms(tensors)


@torch.library.register_fake("ddpcore::segment_norms")
def _(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((len(tensors),), dtype=torch.float64)
