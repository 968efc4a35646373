"""``sgd_step_`` with momentum against the step of ``torch.optim.SGD(fused=True)``."""

from __future__ import annotations

import argparse

import torch
from common import Case, itemsize, main, randn, torch_step

from ddpcore import ops

RULE = {"lr": 1e-3, "momentum": 0.9}


def sgd(numel: int, options: argparse.Namespace) -> Case:
    """One flat tensor. Reads weights, gradient, momentum; writes weights, momentum: 20 bytes an element in fp32."""
    params, grads, buffers = ([randn(numel, options)] for _ in range(3))
    return Case(
        "sgd_step_, momentum",
        lambda: ops.sgd_step_(params, grads, buffers, **RULE),
        torch_step(torch.optim.SGD, numel, options, **RULE),
        "torch fused SGD",
        5 * itemsize(options) * numel,
    )


if __name__ == "__main__":
    main(__doc__, [sgd])
