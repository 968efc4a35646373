"""``mix_`` and ``mix_stacked_`` against torch expressions with the same result, including the distances."""

from __future__ import annotations

import argparse

import torch
from common import Case, itemsize, main, randn
from torch import Tensor

from ddpcore import ops

NUM_LEARNERS = 4


def mix_eager(weights: Tensor, peers: list[Tensor], self_weight: float, peer_weights: list[float]) -> Tensor:
    """The same as ``mix_``, in plain torch."""
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
    """Reads and writes weights: 8 bytes an element in fp32. Its time is mostly arithmetic."""
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
    """The same as ``mix_stacked_``, in plain torch."""
    distances = torch.linalg.vector_norm(weights - weights.mean(dim=0), dim=1, dtype=torch.float32).square()
    weights.copy_(matrix @ weights)
    return distances


def mix_stacked(
    numel: int, options: argparse.Namespace, num_learners: int = NUM_LEARNERS, *, distances: bool = True
) -> Case:
    """Learners on a ring with ``numel`` elements in all. Each is read and written once: 8 bytes an element in fp32.

    Without distances, as virtual learners train, the baseline is the same mix with them.
    """
    columns = -(-numel // num_learners)
    left, right = randn(columns, options, num_learners), randn(columns, options, num_learners)
    ranks = torch.arange(num_learners)
    neighbors = torch.stack([ranks, ranks - 1, ranks + 1], dim=1).remainder(num_learners).flatten()
    offsets, values = torch.arange(num_learners + 1) * 3, torch.full((3 * num_learners,), 1 / 3)
    rows = [part.to(options.device) for part in (offsets, neighbors, values)]
    ring = torch.eye(num_learners, device=options.device, dtype=right.dtype)
    ring = (ring + ring.roll(1, 0) + ring.roll(-1, 0)) / 3
    return Case(
        f"mix_stacked_, ring of {num_learners}" + ", no distances" * (not distances),
        lambda: ops.mix_stacked_(left, [], *rows, distances=distances),
        lambda: mix_stacked_eager(right, ring) if distances else ops.mix_stacked_(right, [], *rows),
        "torch eager" if distances else "with distances",
        2 * itemsize(options) * numel,
    )


def mix_stacked_alone(numel: int, options: argparse.Namespace) -> Case:
    """The mix of virtual learners in training."""
    return mix_stacked(numel, options, distances=False)


def mix_tall_stack(numel: int, options: argparse.Namespace) -> Case:
    """The largest number of learners of one call on CUDA: tiles of a few columns."""
    return mix_stacked(numel, options, 1024)


if __name__ == "__main__":
    main(__doc__, [mix, noise, mix_stacked, mix_stacked_alone, mix_tall_stack])
