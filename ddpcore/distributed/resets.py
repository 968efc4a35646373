"""Gradients of some virtual learners alone that a loop resets, as ``zero_grad()`` of learner 0's model does."""

from __future__ import annotations

import weakref
from itertools import islice

import torch
from torch import Tensor

from ddpcore.parameters.flat import FlatParameters

_SAMPLE = 2  # parameters that are compared: the one whose gradient has just come tells nothing


class ResetWatch:
    """Notes, when a backward pass begins, which learners have lost the gradients of the last step.

    The next step reads the result: a loop may reset each learner just before its own pass, or measure one learner in
    between and then reset all.

    Args:
        flat: the parameters of all learners. Their hooks hold this object, so it holds none of them.
    """

    def __init__(self, flat: FlatParameters) -> None:
        self._flat, self._num_rows = weakref.ref(flat), flat.num_rows
        self._pass = -1  # autograd's number of the current backward pass
        self._sample: list[list[int]] = []  # for each of some parameters its index of each learner
        self._reset: set[int] = set()  # learners

    def restart(self) -> None:
        """Forget the last step."""
        self._sample, self._reset = [], set()

    def begin_step(self) -> None:
        """After a step: choose parameters that have a gradient of every learner."""
        flat = self._flat()
        assert flat is not None
        num, parameters = len(flat.segments), flat.parameters
        places = (list(range(segment, num * self._num_rows, num)) for segment in range(num))
        held = (own for own in places if all(parameters[index].grad is not None for index in own))
        self._sample, self._reset = list(islice(held, _SAMPLE)), set()

    def note(self, parameter: Tensor) -> None:
        """A gradient has come, perhaps the first one of a backward pass."""
        if (current := torch._C._current_graph_task_id()) != self._pass:
            self._pass = current
            self._begin_pass(parameter)

    def _begin_pass(self, first: Tensor) -> None:
        flat = self._flat()
        if flat is None:
            return
        for own in self._sample:
            others = [(row, flat.parameters[index]) for row, index in enumerate(own)]
            others = [(row, parameter) for row, parameter in others if parameter is not first]
            lacking = [row for row, parameter in others if parameter.grad is None]
            self._reset.update(range(self._num_rows) if len(lacking) == len(others) else lacking)

    def note_all(self) -> None:
        """Gradients of all learners have come together, which is so only if all had some, or none."""
        self._reset.update(range(self._num_rows))

    def check(self) -> None:
        """Before a step. RuntimeError: gradients of some learners were reset, and those of the others add up."""
        if 0 < len(self._reset) < self._num_rows:
            learners = ", ".join(map(str, sorted(self._reset)))
            raise RuntimeError(
                f"gradients of learner {learners} alone were reset after the last step, as zero_grad() of its model "
                "does, and those of the others add up: call optimizer.zero_grad(), or zero_grad() of each of "
                "handle.models"
            )
