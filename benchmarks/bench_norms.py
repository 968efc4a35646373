"""``segment_norms`` and ``total_norm_`` over tensors of mixed sizes against ``torch._foreach_norm``."""

from __future__ import annotations

import argparse

import torch
from common import Case, itemsize, main, pieces

from ddpcore import ops


def norms(numel: int, options: argparse.Namespace) -> Case:
    """One sum for each tensor. Reads once: 4 bytes an element in fp32."""
    tensors = pieces(numel, options)
    return Case(
        f"segment_norms, {len(tensors)} tensors",
        lambda: ops.segment_norms(tensors),
        lambda: torch.stack(torch._foreach_norm(tensors)).square(),
        "torch foreach",
        itemsize(options) * sum(tensor.numel() for tensor in tensors),
    )


def total_norm(numel: int, options: argparse.Namespace) -> Case:
    """One sum over all tensors, as for gradient clipping. Reads once."""
    tensors = pieces(numel, options)
    out = torch.zeros(1 + ops.num_blocks(tensors), dtype=torch.float64, device=options.device)
    return Case(
        f"total_norm_, {len(tensors)} tensors",
        lambda: ops.total_norm_(tensors, out),
        lambda: torch.stack(torch._foreach_norm(tensors)).square().sum(),
        "torch foreach",
        itemsize(options) * sum(tensor.numel() for tensor in tensors),
    )


if __name__ == "__main__":
    main(__doc__, [norms, total_norm])
