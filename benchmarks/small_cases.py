"""Runs every kernel on a few small tensors, for a memory checker. Prints one line for each kernel and dtype.

Random numbers are drawn on the CPU and copied, so that nearly all kernels on the GPU are those of ddpcore.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from common import DTYPES

from ddpcore import ops, optim
from ddpcore.parameters.flat import FlatParameters

SIZES = [(1,), (3, 5), (4096,), (4097,), (70, 71)]  # around the length of a block, aligned and not

Options = dict[str, Any]
OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], Options]] = [
    (optim.FusedSGD, {"momentum": 0.9}),
    (optim.FusedSGD, {"momentum": 0.9, "nesterov": True, "decoupled_weight_decay": True, "maximize": True}),
    (optim.FusedAdamW, {}),
    (optim.FusedAdamW, {"decoupled_weight_decay": False, "maximize": True}),
    (optim.FusedLARS, {"variant": "you2017"}),
    (optim.FusedLARS, {"variant": "scaled_lr"}),
    (optim.FusedLAMB, {"variant": "paper"}),
    (optim.FusedLAMB, {"variant": "undebiased", "decay_mode": "coupled", "trust_clip": 10.0}),
]


def randn(shape: tuple[int, ...], options: argparse.Namespace, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype).to(options.device)


def steps(options: argparse.Namespace, dtype: torch.dtype) -> None:
    """Two steps of each optimizer, with two groups, clipping, and masters behind 16-bit weights."""
    for kind, rule in OPTIMIZERS:
        for masters in (False, True) if dtype.itemsize == 2 else (False,):
            params = [torch.nn.Parameter(randn(shape, options, dtype)) for shape in SIZES]
            for param in params:
                param.grad = randn(tuple(param.shape), options, dtype)
            groups = [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:]}]
            optimizer = kind(groups, lr=0.1, weight_decay=0.01, max_grad_norm=1.0, master_weights=masters, **rule)
            for _ in range(2):
                optimizer.step()
            print(f"{kind.__name__} {rule}, {dtype}{', masters' if masters else ''}")


def mixed_steps(options: argparse.Namespace, dtype: torch.dtype) -> None:
    """A step with an average of one and of three peers in the same pass, of each optimizer."""
    for kind, rule in OPTIMIZERS:
        for num_peers in (1, 3):
            params = [torch.nn.Parameter(randn(shape, options, dtype)) for shape in SIZES]
            flat = FlatParameters([[(str(index), param) for index, param in enumerate(params)]])
            optimizer = kind(params, lr=0.1, weight_decay=0.01, **rule)
            step = optimizer.bind(flat)
            for param in params:
                param.grad = randn(tuple(param.shape), options, dtype)
            share = 1 / (num_peers + 1)
            peers = [randn((flat.numel,), options, dtype) for _ in range(num_peers)]
            step.average(ops.Mixture(peers, share, [share] * num_peers))
            optimizer.step()
        print(f"mixed steps of {kind.__name__} {rule}, {dtype}")


def sums(options: argparse.Namespace, dtype: torch.dtype) -> None:
    """Inner products of one and of three rows, in segments of which one is empty; about zero and about an origin."""
    for numel in (1, 4097):
        for num_rows in (1, 3):
            rows = [randn((numel,), options, dtype) for _ in range(num_rows)]
            for origin in (None, rows[0], randn((numel,), options, dtype)):
                ops.noise_sums(rows, [0, numel // 3, numel // 3, numel], origin)
    print(f"noise sums, {dtype}")


def mixes(options: argparse.Namespace, dtype: torch.dtype) -> None:
    """Averages with no, one and three peers, of a stack of learners, and of all its rows, and sums of squares."""
    for numel in (1, 4097):
        for num_peers in (0, 1, 3):
            weights = randn((numel,), options, dtype)
            peers = [randn((numel,), options, dtype) for _ in range(num_peers)]
            share = 1 / (num_peers + 1)
            ops.mix_(weights, peers, share, [share] * num_peers)
            ops.mix_(weights, peers, share, [share] * num_peers, ops.Noise(0.1, seed=1, step=2, first=3))
        for num_others in (0, 1):
            others = [randn((numel,), options, dtype) for _ in range(num_others)]
            columns = torch.arange(3 + num_others).repeat(3)
            offsets, values = torch.arange(4) * (3 + num_others), torch.full((len(columns),), 1 / (3 + num_others))
            rows = [part.to(options.device) for part in (offsets, columns, values)]
            ops.mix_stacked_(randn((3, numel), options, dtype), others, *rows)
        ops.average_([randn((6, numel), options, dtype)], 3)
    tensors = [randn(shape, options, dtype) for shape in SIZES]
    ops.segment_norms(tensors)
    ops.total_norm_(tensors, torch.zeros(1 + ops.num_blocks(tensors)).double().to(options.device))
    print(f"mixes and norms, {dtype}")


def all_cases(options: argparse.Namespace) -> None:
    for dtype in DTYPES.values():
        steps(options, dtype)
        mixed_steps(options, dtype)
        mixes(options, dtype)
        sums(options, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    all_cases(options)
    if options.device == "cuda":
        torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
