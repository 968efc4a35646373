"""Whether all passes of a step, whose gradients are added, have the same numbers of samples."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ddpcore.parameters.flat import FlatParameters
from ddpcore.parameters.hooks import exclude_from_compilation, weakly
from ddpcore.parameters.shards import local


class SampleWatch:
    """Notes the numbers of samples, float64 ``[L]``, under which each gradient has come. For ``weights="samples"``.

    A gradient that comes again in the same tensor was added to the earlier one. ``name`` is the strategy's; if it
    ``counts`` no samples, nothing is noted.
    """

    def __init__(self, flat: FlatParameters, name: str, *, counts: bool) -> None:
        self._flat, self._name, self.is_on = flat, name, counts
        self._counts: Tensor | None = None
        self._passes: dict[int, tuple[TensorWeakRef, Tensor]] = {}  # by id: its gradient, and the counts
        self._is_mixed = False
        if counts:
            exclude_from_compilation(SampleWatch, "_note", "_note_all", "set", "check", "forget_reset", "renew")
            hook = weakly(self._note)
            for parameter in flat.parameters:
                parameter.register_post_accumulate_grad_hook(hook)
            flat.on_gradients.append(self._note_all)

    def set(self, counts: Tensor | None) -> None:
        """The loop has set other numbers, or None, which begins a step anew."""
        self._counts = counts
        self.forget_reset()
        if counts is None:
            self.clear()

    def clear(self) -> None:
        """Gradients were averaged by their numbers, or a step ends."""
        self._passes.clear()
        self._is_mixed = False

    def forget_reset(self) -> None:
        """Begin anew if the program has set all gradients to None or to zero."""
        if self._passes and not any(map(_is_nonzero, self._gradients())):
            self.clear()

    def renew(self) -> None:
        """Gradients have moved into the flat buffer."""
        for parameter in self._flat.parameters if self._passes else ():
            if id(parameter) in self._passes and parameter.grad is not None:
                self._passes[id(parameter)] = TensorWeakRef(parameter.grad), self._passes[id(parameter)][1]

    def check(self) -> None:
        """RuntimeError: gradients of other numbers were added, or the numbers are others now."""
        if self._passes and (self._is_mixed or any(map(self._is_other, self._flat.parameters))):
            raise RuntimeError(
                f"{self._name}: num_samples was another one in another pass of this step, whose gradients are added: "
                "set it to the samples of all passes, and divide their losses by it, or to None to leave a step out"
            )

    def _gradients(self) -> Iterator[Tensor]:
        return (parameter.grad for parameter in self._flat.parameters if parameter.grad is not None)

    def _is_other(self, parameter: Tensor) -> bool:
        ref, counts = self._passes.get(id(parameter), (None, None))
        if ref is None or counts is None or self._counts is None or ref() is not parameter.grad:
            return False
        return counts is not self._counts and not torch.equal(counts.nan_to_num(-1), self._counts.nan_to_num(-1))

    def _note(self, parameter: Tensor) -> None:
        if self._counts is not None and parameter.grad is not None:
            self._is_mixed |= self._is_other(parameter)
            self._passes[id(parameter)] = TensorWeakRef(parameter.grad), self._counts

    def _note_all(self) -> None:
        for parameter in self._flat.parameters:
            self._note(parameter)


def _is_nonzero(gradient: Tensor) -> bool:
    return bool((gradient._values() if gradient.is_sparse else local(gradient)).any())
