"""Numbers that are not finite: how they are found at the cost of one sum, and how they are named.

A sum of numbers is not finite if one of them is not. If it is not finite, each number is looked at: the sum of finite
numbers may overflow.

Shapes: L learners of this process, X columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddpcore.ops.dtypes import is_narrow, wide

ON_NONFINITE = ("raise", "skip", "quarantine")


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """A gradient, or weights, that are not finite.

    Attributes:
        step: the optimizer step, counted from 1.
        learner: whose; None if only the average over learners is not finite.
        parameter: the first parameter, in the order of ``model.named_parameters()``, that is not finite.
        what: ``gradient`` or ``weights``.
        action: one of ``ON_NONFINITE``.
    """

    step: int
    learner: int | None
    parameter: str
    what: str
    action: str

    def __str__(self) -> str:
        whose = "the average over learners" if self.learner is None else f"learner {self.learner}"
        return f"step {self.step}, {whose}: the {self.what} of {self.parameter} {_VERB[self.what]} not finite"


_VERB = {"gradient": "is", "weights": "are"}
_ADVICE = {
    "gradient": "no weight has changed: lower the learning rate, clip gradients, or pass on_nonfinite='skip'",
    "weights": "no other learner has got them: begin at the last checkpoint, with a lower learning rate",
}


class NonFiniteError(RuntimeError):
    """A gradient, or weights to be sent, are not finite. No other learner has got such a weight.

    Attributes:
        found: a :class:`NonFinite` for each learner.
    """

    def __init__(self, found: Sequence[NonFinite]) -> None:
        self.found = tuple(found)
        first = self.found[0]
        others = f", and {len(self.found) - 1} more learners" if len(self.found) > 1 else ""
        super().__init__(f"{first}{others}: {_ADVICE[first.what]}")

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[tuple[NonFinite, ...]]]:
        return NonFiniteError, (self.found,)


def row_sums(rows_LX: Tensor) -> Tensor:
    """The sum ``[L]`` of each row, not finite if a number of the row is not. 16-bit numbers are added in fp32."""
    return rows_LX.sum(dim=1, dtype=wide(rows_LX.dtype))


def suspects(sums_L: Tensor) -> list[int]:
    """The rows whose sum is not finite. It waits for the device."""
    return [row for row, total in enumerate(sums_L.tolist()) if not math.isfinite(total)]


def suspect_rows(rows_LX: Tensor) -> list[int]:
    """The rows that may hold a number that is not finite. It waits for the device."""
    if len(rows_LX) > 1 or is_narrow(rows_LX.dtype):
        return suspects(row_sums(rows_LX))
    return [] if math.isfinite(rows_LX.sum().item()) else [0]  # a third of the time for small models


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all floating-point and complex numbers of the tensors are finite."""
    numbers = [tensor.detach() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    found = [tensor._values() if tensor.is_sparse else tensor for tensor in numbers]
    return all(bool(tensor.isfinite().all()) for tensor in found)


def first_nonfinite(model: nn.Module, *, gradients: bool) -> str | None:
    """The name of the first parameter of a model whose gradient, or whose weights, are not finite; None if all are."""
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter
        if tensor is not None and parameter.requires_grad and not is_finite([tensor]):
            return name
    return None


def is_capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which no number can be read."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
