"""The weights at which a round of local steps began, and the outer optimizer that steps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


def outer_of(name: str, wanted: MakeOptimizer | Mapping[str, Any] | None) -> MakeOptimizer | None:
    """The outer optimizer. A mapping has the settings of ``torch.optim.SGD``.

    Args:
        name: of the strategy, for the message.
        wanted: such as ``{"lr": 0.7, "momentum": 0.9, "nesterov": True}``.

    Raises:
        ValueError: the optimizer refuses a setting.
    """
    if wanted is None or callable(wanted):
        return wanted
    if not isinstance(wanted, Mapping):
        raise ValueError(f"{name}: outer is {wanted!r}: it must be a mapping, settings of an SGD")
    make: MakeOptimizer = partial(torch.optim.SGD, **wanted)
    try:
        make([torch.zeros(1, dtype=torch.float32, device="cpu")])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: outer: {error}") from error
    return make


class Anchor:
    """The outer optimizer, and the weights that it steps: those of A learners.

    Where all learners average with all, they share one anchor (A = 1), which is equal on every rank. Where they average
    with neighbours, each learner has its own (A = L).

    Args:
        weights_AP: the weights at the start.
        columns: the first column and the end of each part.
        make: makes the optimizer from the parts of all learners, tensors of one dimension.
    """

    def __init__(self, weights_AP: Tensor, columns: Sequence[tuple[int, int]], make: MakeOptimizer) -> None:
        self._parts = [
            [row[begin:end].clone().requires_grad_() for row in weights_AP.detach()] for begin, end in columns
        ]
        self._optimizer = make([part for rows in self._parts for part in rows])

    def rows(self, index: int) -> Tensor:
        """Part ``index``, ``[A, X]``."""
        rows = [row.detach() for row in self._parts[index]]
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)

    @torch.no_grad()
    def set_(self, rows_AX: Tensor, index: int) -> None:
        """Overwrite part ``index``."""
        for part, row in zip(self._parts[index], rows_AX, strict=True):
            part.copy_(row)

    def restart(self) -> None:
        """Forget the state of the optimizer, such as its momentum."""
        self._optimizer.state.clear()

    @torch.no_grad()
    def step(self, gradients_AX: Tensor, index: int) -> Tensor:
        """Step part ``index``, and return it."""
        for part, gradient in zip(self._parts[index], gradients_AX, strict=True):
            part.grad = gradient
        self._optimizer.step()
        for part in self._parts[index]:
            part.grad = None
        return self.rows(index)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        parts = [part.detach() for rows in self._parts for part in rows]
        return {"parts": parts, "optimizer": self._optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        parts = [part for rows in self._parts for part in rows]
        for part, saved in zip(parts, state["parts"], strict=True):
            part.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
