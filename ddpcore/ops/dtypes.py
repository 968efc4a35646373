"""The dtypes that the kernels support, and the dtype in which values of 16 bits are added."""

from __future__ import annotations

import torch

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights and gradients. The kernels compute in float32 for all of them."""


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether the dtype has 16 bits, too few for long sums and for small changes of a weight."""
    return dtype in (torch.bfloat16, torch.float16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums and copies of such values: float32 for dtypes of 16 bits, else the dtype itself."""
    return torch.float32 if is_narrow(dtype) else dtype
