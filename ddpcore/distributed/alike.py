"""Whether learners that must be equal are equal: the options of their optimizers, and their weights."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ddpcore.optim.batch import is_capturing
from ddpcore.strategies.learner import Learner

FIRST, EVERY = 16, 16  # each of the first steps is checked, and then one of so many
_SAMPLE = 256  # weights of each learner


class AlikeCheck:
    """Compares the learners of a strategy that keeps them identical, such as ``SSGD``.

    Its average makes gradients equal, so learners differ only after one of them was given other weights, another state
    of its optimizer, or other options. Ranks compare in steps that all of them know, because a change on one rank tells
    the others nothing. It takes one small ``gather``.
    """

    def check(self, learner: Learner) -> None:
        """Compare the learners before a step. Collective.

        Raises:
            RuntimeError: an option of a group differs, or the weights do. Nothing was stepped.
        """
        step, flat = learner.step, learner.flat
        if learner.comm.num_learners == 1 or (step >= FIRST and step % EVERY) or is_capturing(flat.param_LP):
            return
        options = _options(learner.optimizer)
        numbers = torch.tensor([value for _, value in options], dtype=torch.float64, device=flat.param_LP.device)
        sums = _sums_of_bits(flat.param_LP)
        everyone = learner.comm.gather(torch.cat([numbers.repeat(len(sums), 1), sums[:, None]], dim=1)).cpu()
        differs = (everyone != everyone[0]).any(dim=0).tolist()
        if not any(differs):
            return
        for (name, _), is_other, column in zip(options, differs, everyone.unbind(dim=1), strict=False):
            if is_other:
                other = int((column != column[0]).nonzero()[0])
                raise RuntimeError(
                    f"{name} is {float(column[0]):g} on learner 0 and {float(column[other]):g} on learner {other}, "
                    "which must stay equal: give all of them the same optimizer, schedule and loaded state"
                )
        other = int((everyone[:, -1] != everyone[0, -1]).nonzero()[0])
        raise RuntimeError(
            f"the weights of learner {other} differ from those of learner 0, and their average of gradients cannot "
            "bring them together: load states of model and optimizer, and change weights, on all learners alike"
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


def _sums_of_bits(weights_LP: Tensor) -> Tensor:
    """``[L]``: sums of the bytes of some weights, each times its place."""
    stride = weights_LP.shape[1] // _SAMPLE | 1  # odd, because each parameter begins at a multiple of 16
    parts = weights_LP.detach()[:, ::stride].contiguous().view(torch.uint8).to(torch.float64)
    places = torch.arange(1, 1 + parts.shape[1], dtype=torch.float64, device=parts.device)
    return (parts * places).sum(dim=1)
