"""Buffers that a step needs besides its tensors. The caller creates them once and keeps them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 4096  # kBlock of csrc/args.h


def num_blocks(tensors: Sequence[Tensor]) -> int:
    """The number of blocks into which the kernels cut the tensors. Sums are computed block by block."""
    return sum(-(-tensor.numel() // BLOCK) for tensor in tensors)


def new_scratch(params: Sequence[Tensor]) -> Tensor:
    """Scratch for a step on these parameters: two partial sums per block, then counters that are zero between steps.

    Steps on some of the parameters may use it too, if steps run one after another.
    """
    size = 2 * num_blocks(params) + len(params) + 2
    return torch.zeros(size, dtype=torch.float64, device=params[0].device)


def new_trust(params: Sequence[Tensor]) -> Tensor:
    """``[len(params), 3]`` of NaN. LARS and LAMB write ratio, weight norm and gradient or update norm into it."""
    return torch.full((len(params), 3), math.nan, dtype=torch.float64, device=params[0].device)
