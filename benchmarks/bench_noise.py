"""``noise_sums`` of the gradients of several learners (``--learners``) and of one, against float64 matrix products."""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
from common import Case, itemsize, main, pieces, randn

from ddpcore import ops


def _sums(numel: int, options: argparse.Namespace, num_rows: int, about: bool) -> Case:
    rows = list(randn(numel, options, num_rows).unbind())
    origin = rows[0].clone() if about else None
    bounds = [0]
    for piece in pieces(numel, options):
        bounds.append(min(numel, bounds[-1] + piece.numel()))
    bounds[-1] = numel

    def baseline() -> torch.Tensor:
        values = torch.stack(rows).double() if origin is None else torch.stack([row - origin for row in rows]).double()
        return torch.stack([values[:, b:e] @ values[:, b:e].T for b, e in pairwise(bounds)])

    return Case(
        f"noise_sums, {num_rows} row{'s' * (num_rows > 1)}{', origin' * about}",
        lambda: ops.noise_sums(rows, bounds, origin),
        baseline,
        "torch, float64",
        itemsize(options) * numel * (num_rows + about),
    )


def learners(numel: int, options: argparse.Namespace) -> Case:
    """All learners, 64 segments. Reads each row once."""
    return _sums(numel, options, options.learners, False)


def about_an_origin(numel: int, options: argparse.Namespace) -> Case:
    """The same, with one more row (the origin) subtracted from each."""
    return _sums(numel, options, options.learners, True)


def one(numel: int, options: argparse.Namespace) -> Case:
    """One row. A step of ssgd calls this twice. Reads the row once."""
    return _sums(numel, options, 1, False)


if __name__ == "__main__":
    main(__doc__, [learners, about_an_origin, one])
