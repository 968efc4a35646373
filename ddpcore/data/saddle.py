"""Samples of a finite sum with a strict saddle, for the model `saddle`."""

from __future__ import annotations

import torch

from ddpcore.data.base import Dataset, Split, generator

NUM_CLASSES = 2


def load(
    seed: int = 0, *, dimension: int = 10, num_samples: int = 1024, slope: float = 0.3, coupling: float = 0.1
) -> Dataset:
    """Samples float32 [2 (dimension - 1)], all of label 1: p and then q, normal with std slope and coupling.

    Each sample has its negative among them, so that p and q have mean zero; the order is random. No test split.
    The seed decides them and the global generator is left alone. ValueError for a dimension below 2, an odd number of
    samples or one below 2, and a std below 0.
    """
    if dimension < 2:
        raise ValueError(f"saddle: dimension is {dimension}, it must be at least 2")
    if num_samples < 2 or num_samples % 2:
        raise ValueError(f"saddle: num_samples is {num_samples}, it must be even and at least 2")
    if min(slope, coupling) < 0:
        raise ValueError(f"saddle: slope is {slope} and coupling is {coupling}, they must be at least 0")
    if seed < 0:
        raise ValueError(f"saddle: seed is {seed}, it must be at least 0")
    random = generator(seed)
    half = torch.randn(num_samples // 2, 2, dimension - 1, generator=random)
    half *= torch.tensor([[slope], [coupling]])
    samples = torch.cat([half, -half]).flatten(1)[torch.randperm(num_samples, generator=random)]
    labels = torch.ones(num_samples, dtype=torch.int64)
    return Dataset("saddle", Split(samples, labels), None, NUM_CLASSES, tuple(samples.shape[1:]))
