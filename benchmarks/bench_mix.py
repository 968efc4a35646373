"""``mix_`` and ``mix_stacked_`` against torch expressions that do the same, distances included."""

from __future__ import annotations

import argparse

import torch
from common import Case, itemsize, main, randn
from torch import Tensor

from ddpcore import ops

NUM_LEARNERS = 4


def mix_eager(weights: Tensor, peers: list[Tensor], self_weight: float, peer_weights: list[float]) -> Tensor:
    """What one would write without the kernel."""
    distances = [torch.linalg.vector_norm(weights - peer, dtype=torch.float32).square() for peer in peers]
    weights.mul_(self_weight)
    for peer, peer_weight in zip(peers, peer_weights, strict=True):
        weights.add_(peer, alpha=peer_weight)
    return torch.stack(distances) if distances else weights.new_empty(0)


def mix(numel: int, options: argparse.Namespace) -> Case:
    """Reads weights and peers, writes weights: 12 bytes an element with one peer in fp32."""
    peers = [randn(numel, options) for _ in range(options.peers)]
    share = 1 / (options.peers + 1)
    left, right = randn(numel, options), randn(numel, options)
    return Case(
        f"mix_, {options.peers} peers",
        lambda: ops.mix_(left, peers, share, [share] * options.peers),
        lambda: mix_eager(right, peers, share, [share] * options.peers),
        "torch eager",
        (2 + options.peers) * itemsize(options) * numel,
    )


def noise(numel: int, options: argparse.Namespace) -> Case:
    """Reads and writes weights: 8 bytes an element in fp32. What it costs is arithmetic."""
    left, right = randn(numel, options), randn(numel, options)
    drawn = ops.Noise(std=1e-3, seed=0, step=0)
    return Case(
        "mix_, noise alone",
        lambda: ops.mix_(left, [], 1.0, [], drawn),
        lambda: right.add_(torch.randn_like(right), alpha=1e-3),
        "torch eager",
        2 * itemsize(options) * numel,
    )


def mix_stacked_eager(weights: Tensor, matrix: Tensor) -> Tensor:
    """What one would write without the kernel."""
    distances = torch.linalg.vector_norm(weights - weights.mean(dim=0), dim=1, dtype=torch.float32).square()
    weights.copy_(matrix @ weights)
    return distances


def mix_stacked(numel: int, options: argparse.Namespace) -> Case:
    """Four learners on a ring, ``numel`` elements in all: read once and written once, 8 bytes an element in fp32."""
    columns = -(-numel // NUM_LEARNERS)
    left, right = randn(columns, options, NUM_LEARNERS), randn(columns, options, NUM_LEARNERS)
    ring = torch.eye(NUM_LEARNERS, device=options.device)
    ring = (ring + ring.roll(1, 0) + ring.roll(-1, 0)) / 3
    like_weights = ring.to(right.dtype)
    return Case(
        f"mix_stacked_, ring of {NUM_LEARNERS}",
        lambda: ops.mix_stacked_(left, ring),
        lambda: mix_stacked_eager(right, like_weights),
        "torch eager",
        2 * itemsize(options) * numel,
    )


if __name__ == "__main__":
    main(__doc__, [mix, noise, mix_stacked])
