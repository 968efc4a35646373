"""How much each learner counts in an average: fixed numbers, or the samples that it has trained on.

Shapes: n learners in all, L held by this process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddpcore.strategies.learner import Learner
from ddpcore.topology.base import checked_weights

Weights = Sequence[float] | str | None
"""A number for each learner, one of ``COUNTED``, or None: all learners count alike."""

COUNTED = ("samples", "tokens")


def weights_of(name: str, wanted: Sequence[float] | str) -> Weights:
    """The weights as they are kept. ValueError: a number is negative, all are 0, or there is no such word."""
    if isinstance(wanted, str) and wanted in COUNTED:
        return wanted
    if isinstance(wanted, str):
        raise ValueError(f"{name}: weights is {wanted!r}: give a number for each learner, or {' or '.join(COUNTED)}")
    return checked_weights(name, wanted, zeros=True)


def own_samples(learner: Learner) -> Tensor:
    """The samples of this step, float64 ``[L]``; NaN where the loop has not set them."""
    return counts_of(learner.num_samples, len(learner.comm.learners))


def counts_of(num: int | Sequence[int] | None, rows: int) -> Tensor:
    """What a loop sets as samples, one number for all rows or one for each, as float64 ``[rows]``; NaN for None."""
    counts: list[int | None] = [num] * rows if num is None or isinstance(num, int) else [*num]
    counts = counts if len(counts) == rows else [None] * rows
    return torch.tensor([float("nan") if one is None else one for one in counts], dtype=torch.float64, device="cpu")


def shares_of(name: str, weights: Weights, learner: Learner, counts_L: Tensor | None, size: int = 0) -> Tensor | None:
    """The weight of each learner divided by the mean weight, float64 ``[n]``; None if all are equal.

    Collective if weights are counted.

    Args:
        name: of the strategy, for messages.
        weights: see :data:`Weights`.
        learner: its connection.
        counts_L: the samples of the learners held here.
        size: learners of each group, whose mean divides; 0: all are one group.

    Raises:
        ValueError: on all learners: a number of samples is negative or was not set, or all are 0.
    """
    num = learner.comm.num_learners
    if weights is None:
        return None
    if isinstance(weights, str):
        assert counts_L is not None
        all_n = learner.comm.gather(counts_L.to(learner.flat.param_LP.device)).cpu()
        bad = [rank for rank, count in enumerate(all_n.tolist()) if not count >= 0]
        if bad:
            raise ValueError(
                f"{name}: num_samples of learner {', '.join(map(str, bad))} was not set in each step, or is negative: "
                "before each backward pass set handle.num_samples to the samples of its loss, one for each learner here"
            )
        weights = (all_n.square() if weights == "tokens" else all_n).tolist()
    size = size or num
    table = torch.tensor(weights, dtype=torch.float64, device="cpu").view(-1, size)
    if not bool(table.any(dim=1).all()):
        raise ValueError(
            f"{name}: all learners{' of a group' if size < num else ''} have 0 samples: leave the step out"
        )
    return None if bool((table == table[:, :1]).all()) else (table / table.mean(dim=1, keepdim=True)).view(-1)


def scale_(rows_LX: Tensor, shares_n: Tensor | None, learner: Learner) -> None:
    """Multiply the rows of the learners held here by their shares. A share of 0 gives 0, even for NaN."""
    if shares_n is None:
        return
    for row, share in zip(rows_LX, shares_n[list(learner.comm.learners)].tolist(), strict=True):
        if share == 0:
            row.zero_()
        elif share != 1:
            row.mul_(share)
