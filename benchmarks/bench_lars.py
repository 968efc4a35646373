"""``lars_step_`` against the step of ``torch.optim.SGD(fused=True)``, which computes no norms."""

from __future__ import annotations

import argparse

import torch
from common import Case, itemsize, main, pieces, torch_step

from ddpcore import ops
from ddpcore.ops.steps import bytes_per_param

RULE = {"lr": 1e-3, "momentum": 0.9}


def lars(numel: int, options: argparse.Namespace) -> Case:
    """A list of tensors. The least traffic: 20 bytes an element in fp32, 28 if the cache is too small."""
    params, grads, buffers = (pieces(numel, options) for _ in range(3))
    steps = [torch.zeros(1, device=options.device)]
    scratch, trust = ops.new_scratch(params), ops.new_trust(params)
    group = {"lr": [RULE["lr"]], "weight_decay": [1e-4], "group_sizes": [len(params)], "adapt": [1]}
    return Case(
        f"lars_step_, {len(params)} tensors",
        lambda: ops.lars_step_(params, grads, buffers, [], steps, scratch, trust, momentum=RULE["momentum"], **group),
        torch_step(torch.optim.SGD, numel, options, **RULE),
        "torch fused SGD",
        bytes_per_param("lars", itemsize(options))[0] * numel,
    )


if __name__ == "__main__":
    main(__doc__, [lars])
