"""What a handle does about gradients that are not finite: it raises, skips the step, or quarantines the learner."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_

import torch
from torch import Tensor

from ddpcore.comm.base import Communicator
from ddpcore.optim.base import FusedOptimizer
from ddpcore.parameters.flat import LARGE
from ddpcore.strategies.base import Strategy
from ddpcore.strategies.learner import (
    Learner,
    NonFinite,
    NonFiniteError,
    first_nonfinite,
    is_capturing,
    row_sums,
    suspect_rows,
    suspects,
)

_gradient_of = attrgetter("grad")


class NonFiniteGuard:
    """Checks the gradients of each step before the step changes any weight.

    It costs one sum over the gradients; two if they are averaged, because the average does not tell whose gradient was
    not finite. Steps of a ``GradScaler`` are left to the scaler, and those with a closure or in a CUDA graph are not
    checked.

    Args:
        learner: weights, gradients and optimizer.
        strategy: the strategy, which quarantines.
        on_nonfinite: one of ``ON_NONFINITE``, checked.

    Attributes:
        found: all that was found so far, by step. Averaged gradients are alike on all ranks, and so is this list then;
            else it has only learners of this process. In a group whose average is not finite, a rank names its own
            learners, or the average (None) if their gradients were finite.
    """

    def __init__(self, learner: Learner, strategy: Strategy, on_nonfinite: str) -> None:
        self._learner, self._strategy, self._mode = learner, strategy, on_nonfinite
        self.found: list[NonFinite] = []
        self._sums: dict[int, Tensor] = {}  # [L] for each message by its first column, before its average
        self._has_buffers = any(self._buffers(row) for row in range(len(learner.models)))
        self._kept: list[list[Tensor]] = []  # copies of each model's buffers
        if on_nonfinite == "quarantine":
            strategy.quarantine(set())

    def begin_step(self) -> None:
        """Before the first forward pass of a step: copy the models' buffers, which batch norm changes in the pass."""
        if self._mode == "raise" or not self._has_buffers:
            return
        rows = range(len(self._learner.models))
        if not self._kept:
            self._kept = [[buffer.clone() for buffer in self._buffers(row)] for row in rows]
        for row in rows:
            torch._foreach_copy_(self._kept[row], self._buffers(row))

    def note(self, columns: Tensor) -> None:
        """Before columns ``[L, n]`` of the gradients are averaged. A later pass before the step replaces them."""
        self._sums[int(columns.storage_offset())] = row_sums(columns)

    def check(self) -> None:
        """Before a step, with the gradients that it uses. Collective if averages of all learners are not finite.

        Raises:
            NonFiniteError: with ``raise``, a gradient is not finite. Nothing has changed.
        """
        learner, optimizer = self._learner, self._learner.optimizer
        sums, self._sums = list(self._sums.values()), {}
        is_scaled = getattr(optimizer, "found_inf", None) is not None  # the scaler has checked, and the step skips
        if is_scaled or is_capturing(learner.flat.grad_LP):
            return
        rows = learner.living(self._suspects())
        named = {row: name for row in rows if (name := first_nonfinite(learner.models[row], gradients=True))}
        if not named:
            return
        first, held = named[min(named)], learner.comm.learners
        covers_all_learners = self._strategy.plan(learner.step).covers_all_learners
        if not sums:
            found = [self._event(held[row], name) for row, name in named.items()]
        elif covers_all_learners:
            found = [self._event(one, first) for one in _all_suspects(sums, learner.comm)]
        else:  # other groups know nothing of it, so nothing is gathered
            own = set(suspects(torch.stack(sums).sum(dim=0)))
            found = [self._event(held[row], name) for row, name in named.items() if row in own]
        found = found or [self._event(None, first)]
        if self._mode == "raise":
            raise NonFiniteError(found)
        self.found += found
        self._leave_out(found, range(learner.flat.num_rows) if sums and covers_all_learners else list(named))

    def _event(self, learner: int | None, name: str) -> NonFinite:
        return NonFinite(
            step=self._learner.step + 1, learner=learner, parameter=name, what="gradient", action=self._mode
        )

    def _suspects(self) -> list[int]:
        """Rows whose gradients may not be finite."""
        flat = self._learner.flat
        own: dict[int, Tensor] = {}
        if isinstance(self._learner.optimizer, FusedOptimizer):
            own = flat.own_grads(LARGE)
            flat.gather_grads(left=own)  # as the step itself begins
        gradients = list(map(_gradient_of, flat.parameters))
        if all(map(is_, gradients, flat.grad_views)):
            return suspect_rows(flat.grad_LP)
        num = len(flat.segments)
        return [row for row in range(flat.num_rows) if _is_suspect(gradients[row * num : (row + 1) * num])]

    def _leave_out(self, found: list[NonFinite], rows: range | list[int]) -> None:
        """Remove the gradients of some rows, so that any optimizer leaves these parameters and their states alone."""
        learner = self._learner
        for row in rows:
            for parameter in learner.models[row].parameters():
                parameter.grad = None
        held = {one: row for row, one in enumerate(learner.comm.learners)}
        for row in [held[event.learner] for event in found if event.learner in held]:
            if self._kept:
                torch._foreach_copy_(self._buffers(row), self._kept[row])
        if self._mode == "quarantine":
            self._strategy.quarantine({event.learner for event in found if event.learner is not None})

    def _buffers(self, row: int) -> list[Tensor]:
        return list(self._learner.models[row].buffers())


def _is_suspect(gradients: Sequence[Tensor | None]) -> bool:
    given = [one._values() if one.is_sparse else one for one in gradients if one is not None]
    return bool(given) and bool(suspects(torch.stack([one.sum() for one in given]).sum()[None]))


def _all_suspects(sums: list[Tensor], comm: Communicator) -> list[int]:
    """The learners whose own gradients were not finite, before the average. Collective."""
    return suspects(comm.gather(torch.stack(sums).sum(dim=0).double()))
