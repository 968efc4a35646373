"""Whether learners that must be equal are equal: the options of their optimizers, and their weights."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ddpcore.optim.checks import is_capturing
from ddpcore.parameters.flat import FlatParameters
from ddpcore.strategies.learner import Learner

FIRST, EVERY = 16, 16  # each of the first steps is checked, and then one of so many
_SAMPLE = 256  # weights of each learner, and one of each small parameter


def check_alike(learner: Learner, *, is_apart: bool) -> None:
    """Compare the learners of a strategy that keeps them identical, such as ``SSGD``. Collective in some steps.

    Its average makes gradients equal, so learners differ only after one of them was given other weights, another
    state of its optimizer, or other options. Ranks compare in steps that all of them know, because a change on one
    rank tells the others nothing. It takes one small ``gather`` after the average of gradients.

    Args:
        is_apart: whether weights may differ, because a step had no average.

    Raises:
        RuntimeError: an option of a group differs, or the weights do. Nothing was stepped.
    """
    step, flat = learner.step, learner.flat
    if learner.comm.num_learners == 1 or (step >= FIRST and step % EVERY) or is_capturing(flat.param_LP):
        return
    options = _options(learner.optimizer)
    numbers = torch.tensor([value for _, value in options], dtype=torch.float64, device=flat.param_LP.device)
    sums = _sums_of_bits(flat)
    membership = learner.comm.membership
    has_joined = membership is not None and any(change.joined for change in membership.changes)
    apart = torch.full_like(sums, is_apart or has_joined)  # a learner that joins has a momentum of its own
    rows = torch.cat([numbers.repeat(len(sums), 1), torch.stack([sums, apart], dim=1)], dim=1)
    everyone, apart = learner.comm.gather(rows).cpu().split([rows.shape[1] - 1, 1], dim=1)
    if bool(apart.any()):
        everyone[:, -1] = 0.0
    differs = (everyone != everyone[0]).any(dim=0).tolist()
    for (name, _), is_other, column in zip(options, differs, everyone.unbind(dim=1), strict=False):
        if is_other:
            other = int((column != column[0]).nonzero()[0])
            raise RuntimeError(
                f"{name} is {float(column[0]):g} on learner 0 and {float(column[other]):g} on learner {other}, "
                "which must stay equal: give all of them the same optimizer, schedule and loaded state"
            )
    if differs[-1]:
        other = int((everyone[:, -1] != everyone[0, -1]).nonzero()[0])
        raise RuntimeError(
            f"the weights of learner {other} differ from those of learner 0, and their average of gradients cannot "
            "bring them together: load states and change weights on all alike (or traits.stays_identical is wrong)"
        )


def _options(optimizer: torch.optim.Optimizer) -> list[tuple[str, float]]:
    """The names of all options of the groups, with numbers that differ where the options do."""
    found: list[tuple[str, float]] = []
    for index, group in enumerate(optimizer.param_groups):
        for key in sorted(set(optimizer.defaults).intersection(group)):
            values = group[key] if isinstance(group[key], tuple | list) else [group[key]]
            found += [(f"{key} of group {index}", _number_of(value)) for value in values]
    return found


def _number_of(value: Any) -> float:
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return float(value) if is_number else float(crc32(repr(value).encode()))


def _sums_of_bits(flat: FlatParameters) -> Tensor:
    """``[L]``: sums of the bytes of some weights, each times its place. Padding between the weights does not count."""
    stride = max(1, flat.numel // _SAMPLE)
    places = [
        torch.arange(one.offset, one.offset + one.numel, stride, dtype=torch.int64, device="cpu")
        for one in flat.segments
    ]
    columns = torch.cat(places).to(flat.param_LP.device)
    parts = flat.param_LP.detach()[:, columns].contiguous().view(torch.uint8).to(torch.float64)
    return (parts * torch.arange(1, 1 + parts.shape[1], dtype=torch.float64, device=parts.device)).sum(dim=1)
