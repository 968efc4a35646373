"""``segment_norms`` over tensors of mixed sizes against ``torch._foreach_norm``."""

from __future__ import annotations

import argparse

import torch
from common import Case, itemsize, main, randn

from ddpcore import ops

NUM_TENSORS = 64


def norms(numel: int, options: argparse.Namespace) -> Case:
    """Views of one buffer, every second one 63 times its neighbour. Reads once: 4 bytes an element in fp32."""
    pair = max(1, numel * 2 // NUM_TENSORS)
    sizes = [max(1, pair // 64), max(1, pair - pair // 64)] * (NUM_TENSORS // 2)
    tensors = list(randn(sum(sizes), options).split(sizes))
    return Case(
        f"segment_norms, {NUM_TENSORS} tensors",
        lambda: ops.segment_norms(tensors),
        lambda: torch.stack(torch._foreach_norm(tensors)).square(),
        "torch foreach",
        itemsize(options) * sum(sizes),
    )


if __name__ == "__main__":
    main(__doc__, [norms])
