"""``mix_sgd_step_`` with momentum against the step of ``torch.optim.SGD(fused=True)``, which does not mix.

The most important row has 25,000,000 fp32 elements and one peer. Its ratio is the cost of gossip on top of an optimizer
step; from memory traffic alone one expects 24/20.
"""

from __future__ import annotations

import argparse

import torch
from common import Case, itemsize, main, randn, torch_step

from ddpcore import ops

RULE = {"lr": 1e-3, "momentum": 0.9}


def mix_sgd(numel: int, options: argparse.Namespace) -> Case:
    """Reads weights, peers, gradient and momentum, writes weights and momentum: 24 bytes with one peer in fp32."""
    weights, grad, buffer = (randn(numel, options) for _ in range(3))
    peers = [randn(numel, options) for _ in range(options.peers)]
    share = 1 / (options.peers + 1)
    return Case(
        f"mix_sgd_step_, momentum, {options.peers} peers",
        lambda: ops.mix_sgd_step_(weights, peers, share, [share] * options.peers, grad, buffer, **RULE),
        torch_step(torch.optim.SGD, numel, options, **RULE),
        "torch fused SGD",
        (5 + options.peers) * itemsize(options) * numel,
    )


if __name__ == "__main__":
    main(__doc__, [mix_sgd])
