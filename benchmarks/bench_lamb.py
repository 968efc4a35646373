"""``lamb_step_`` against the step of ``torch.optim.AdamW(fused=True)``, which computes no norms."""

from __future__ import annotations

import argparse

import torch
from common import Case, itemsize, main, pieces, torch_step

from ddpcore import ops
from ddpcore.ops.steps import bytes_per_param


def lamb(numel: int, options: argparse.Namespace) -> Case:
    """A list of tensors. The least traffic: 28 bytes an element in fp32, 40 if the cache is too small."""
    params, grads = pieces(numel, options), pieces(numel, options)
    moments = [[torch.zeros_like(param, dtype=torch.float32) for param in params] for _ in range(2)]
    steps = [torch.zeros(1, device=options.device)]
    scratch, trust = ops.new_scratch(params), ops.new_trust(params)
    group = {"lr": [1e-3], "weight_decay": [1e-4], "group_sizes": [len(params)], "adapt": [1]}
    return Case(
        f"lamb_step_, {len(params)} tensors",
        lambda: ops.lamb_step_(params, grads, *moments, [], steps, scratch, trust, **group),
        torch_step(torch.optim.AdamW, numel, options, lr=1e-3, weight_decay=1e-4),
        "torch fused AdamW",
        bytes_per_param("lamb", itemsize(options))[0] * numel,
    )


if __name__ == "__main__":
    main(__doc__, [lamb])
