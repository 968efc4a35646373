"""Whether all passes of a step, whose gradients are added, have the same numbers of samples."""

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ddpcore.parameters.flat import FlatParameters
from ddpcore.parameters.hooks import exclude_from_compilation, weakly
from ddpcore.parameters.shards import local


class SampleWatch:
    """Notes the numbers of samples, float64 ``[L]``, under which each gradient has come. For ``weights="samples"``.

    A gradient that comes again in the same tensor, or in the flat buffer, was added to the earlier one. If torch adds
    into a new tensor, it counts as added, unless the earlier one was None at the next forward pass or number: then the
    program has reset it. ``name`` is the strategy's; if it ``counts`` no samples, nothing is noted.
    """

    def __init__(self, flat: FlatParameters, name: str, *, counts: bool) -> None:
        self._flat, self._name, self.is_on = flat, name, counts
        self._counts: Tensor | None = None
        self._passes: dict[int, tuple[TensorWeakRef, Tensor, bool]] = {}  # by id: gradient, counts, is it sparse
        self._is_mixed = self._is_averaged = False  # the latter: since the numbers were set
        if counts:
            exclude_from_compilation(SampleWatch, "_note", "_note_all", "set", "check", "forget_reset", "renew")
            exclude_from_compilation(SampleWatch, "note_average")
            hook = weakly(self._note)
            for parameter in flat.parameters:
                parameter.register_post_accumulate_grad_hook(hook)
            flat.on_gradients.append(self._note_all)

    def set(self, counts: Tensor | None) -> None:
        """The loop has set other numbers, or None, which begins a step anew."""
        self._counts, self._is_averaged = counts, False
        self.forget_reset()
        if counts is None:
            self.clear()

    def clear(self) -> None:
        """Gradients were averaged by their numbers, or a step ends."""
        self._passes.clear()
        self._is_mixed = False

    def forget_reset(self) -> None:
        """Begin anew if the program has set all gradients to None or to zero."""
        (self.renew if not self._passes or has_gradients(self._flat) else self.clear)()

    def renew(self) -> None:
        """Gradients have moved into the flat buffer, or the program has put others in their place."""
        for parameter in self._flat.parameters if self._passes else ():
            if id(parameter) in self._passes and parameter.grad is not None:
                self._passes[id(parameter)] = TensorWeakRef(parameter.grad), *self._passes[id(parameter)][1:]

    def note_average(self, *, of_all: bool) -> None:
        """Gradients of all learners, or of groups, were averaged by their numbers."""
        self._is_averaged = True
        (self.clear if of_all else self.renew)()

    @property
    def is_anew(self) -> bool:
        """Whether the loop has set numbers for a new step: since then no average has ended, and no gradient is left."""
        return self.is_on and not self._is_averaged and not has_gradients(self._flat)

    def check(self) -> None:
        """RuntimeError: gradients of other numbers were added, or the numbers are others now."""
        if self._passes and (self._is_mixed or any(map(self._is_other, self._flat.parameters))):
            what = f"{self._name}: num_samples was another one in another pass of this step"
            advice = "set it to the samples of all passes, and divide their losses by it"
            raise RuntimeError(f"{what}, whose gradients are added: {advice}, or to None to leave a step out")

    def _is_other(self, parameter: Tensor) -> bool:
        ref, counts, is_sparse = self._passes.get(id(parameter), (None, None, False))
        if ref is None or counts is None or self._counts is None or (gradient := parameter.grad) is None:
            return False
        flat, makes_new = self._flat, gradient.requires_grad or (is_sparse and not gradient.is_sparse)
        has_moved = flat.grad_start is not None and gradient is flat.grad_views[flat.index[id(parameter)]]
        if not (makes_new or has_moved or ref() is gradient):
            return False
        return counts is not self._counts and not torch.equal(counts.nan_to_num(-1), self._counts.nan_to_num(-1))

    def _note(self, parameter: Tensor) -> None:
        if self._counts is not None and parameter.grad is not None:
            self._is_mixed |= self._is_other(parameter)
            self._passes[id(parameter)] = TensorWeakRef(parameter.grad), self._counts, parameter.grad.is_sparse

    def _note_all(self) -> None:
        for parameter in self._flat.parameters:
            self._note(parameter)


def has_gradients(flat: FlatParameters, *, shared: bool = False) -> bool:
    """Whether a gradient is not zero. If ``shared``, gradients of the learner's other shards count, too: collective."""
    gradients = [parameter.grad for parameter in flat.parameters if parameter.grad is not None]
    found = any(bool((one._values() if one.is_sparse else local(one)).any()) for one in gradients)
    if not shared or flat.shards is None:
        return found
    return bool(flat.shards.add_(torch.tensor(float(found), dtype=torch.float64, device=flat.param_LP.device)))
