"""Steps that begin with a mix against torch's fused steps, which do not mix.

``sgd_step_``, ``adamw_step_``, ``lars_step_`` and ``lamb_step_`` with a mix. The most important rows have 25,000,000
fp32 elements and one peer. Their ratio is the cost of gossip on top of an optimizer step; from memory traffic alone one
expects 24/20 of SGD and 32/28 of AdamW.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from common import Case, bytes_per_param, itemsize, main, randn, torch_step

from ddpcore import ops

MOMENTUM = {"lr": 1e-3, "momentum": 0.9}
ADAM = {"lr": 1e-3, "weight_decay": 1e-4}
TORCHS = {"sgd": (torch.optim.SGD, MOMENTUM), "adamw": (torch.optim.AdamW, ADAM)}


def mix_step(rule: str, numel: int, options: argparse.Namespace) -> Case:
    """The bytes of the step, and those of the peers."""
    has_moments, has_ratio = rule in ("adamw", "lamb"), rule in ("lars", "lamb")
    params, grads = [randn(numel, options)], [randn(numel, options)]
    like = params[0].float() if has_moments else params[0]
    states = [[torch.zeros_like(like)] for _ in range(2 if has_moments else 1)]
    peers = [randn(numel, options) for _ in range(options.peers)]
    share = 1 / (options.peers + 1)
    steps, scratch = [torch.zeros(1, device=options.device)], ops.new_scratch(params)
    group = {"lr": [1e-3], "weight_decay": [1e-4 if has_moments else 0.0], "group_sizes": [1]}
    extra = {"adapt": [1]} if has_ratio else {}
    extra |= {} if has_moments else {"momentum": 0.9}
    extra |= {"mixture": ops.Mixture(peers, share, [share] * options.peers), "offsets": [0]}
    step = getattr(ops, f"{rule}_step_")
    rows = [ops.new_trust(params)] if has_ratio else []
    kind, of_torch = TORCHS["adamw" if has_moments else "sgd"]
    return Case(
        f"{rule}_step_ with a mix, {options.peers} peers",
        lambda: step(params, grads, *states, [], steps, scratch, *rows, **group, **extra),
        torch_step(kind, numel, options, **of_torch),
        f"torch fused {kind.__name__}",
        (bytes_per_param(rule, itemsize(options))[0] + options.peers * itemsize(options)) * numel,
    )


if __name__ == "__main__":
    main(__doc__, [partial(mix_step, rule) for rule in ("sgd", "adamw", "lars", "lamb")])
