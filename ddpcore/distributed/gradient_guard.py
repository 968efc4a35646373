"""Checks before a step: gradients set after the average, or for some virtual learners only, are refused."""

from __future__ import annotations

from torch import Tensor

from ddpcore.parameters.buckets import weakly
from ddpcore.parameters.compilation import exclude_from_compilation
from ddpcore.parameters.flat import FlatParameters


class GradientGuard:
    """Remembers how often each gradient was changed in place, to see changes that a strategy does not know of."""

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._stepped: list[int] = []  # versions of the flat views at the end of the last step
        self._noted: dict[int, int] = {}  # versions of virtual learners' gradients after their last pass

    def watch(self) -> None:
        """Note each virtual learner's gradient as soon as autograd has written it."""
        if self._flat.num_rows > 1:
            exclude_from_compilation(GradientGuard, "_note", "_note_views")
            self._flat.on_gradients.append(self._note_views)
            note = weakly(self._note)
            for parameter in self._flat.parameters:
                parameter.register_post_accumulate_grad_hook(note)

    def note_all(self) -> None:
        """Note all virtual learners' gradients, after the strategy has changed them."""
        for parameter in self._flat.parameters if self._flat.num_rows > 1 else ():
            self._note(parameter)

    def _note(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._noted[self._flat.index[id(parameter)]] = parameter.grad._version

    def _note_views(self) -> None:
        self._noted = dict(enumerate(self._versions()))

    def note_step(self) -> None:
        """Note the averaged gradients at the end of a step, which a later step may use again."""
        self._stepped = self._versions()

    def has_any(self) -> bool:
        """Whether any parameter has a gradient that is not zero."""
        return any(
            gradient is not None and bool(gradient.any()) for gradient in (p.grad for p in self._flat.parameters)
        )

    def check_averaged(self, strategy: str) -> None:
        """Check, if no backward pass averaged gradients, that a step only repeats those of the last step.

        Raises:
            RuntimeError: a gradient was set or changed.
        """
        unchanged = self._versions() == self._stepped
        for parameter, view in zip(self._flat.parameters, self._flat.grad_views, strict=True):
            if parameter.grad is not None and not (unchanged and parameter.grad is view):
                raise RuntimeError(
                    f"{strategy}: gradients were set or changed without a backward pass and so not averaged: call "
                    "backward() before step()"
                )

    def check_alike(self) -> None:
        """Check that what was done to gradients after the backward pass was done for every virtual learner.

        Raises:
            RuntimeError: it was done for some learners only, such as clipping the gradients of learner 0's model alone.
        """
        flat, versions = self._flat, self._noted
        if flat.num_rows == 1:
            return
        num = len(flat.segments)
        changed = [
            index
            for index, version in versions.items()
            if (gradient := flat.parameters[index].grad) is not None and gradient._version != version
        ]
        self._noted = {}
        for segment in sorted({index % num for index in changed}):
            rows = {index // num for index in changed if index % num == segment}
            known = {index // num for index in versions if index % num == segment}
            if rows != known:
                raise RuntimeError(
                    f"parameter {flat.names[segment]}: the gradients of learner {', '.join(map(str, sorted(rows)))} "
                    "alone were changed after the backward pass: do what the loop does to a model, such as clipping, "
                    "for each of handle.models"
                )

    def _versions(self) -> list[int]:
        return [view._version for view in self._flat.grad_views]
