"""Which dtypes the kernels take, and what stands behind those of 16 bits."""

from __future__ import annotations

import torch

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of weights and gradients; the kernels' arithmetic is float32 in all of them."""


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether it has 16 bits, of which a sum of many numbers, or a small change, would leave nothing."""
    return dtype in (torch.bfloat16, torch.float16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which numbers of this dtype are added and kept: float32 for 16 bits, else itself."""
    return torch.float32 if is_narrow(dtype) else dtype
