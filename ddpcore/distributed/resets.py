"""What a loop does to some virtual learners alone, as ``zero_grad()`` of one model, or to all in place of each."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, repeat
from operator import is_
from typing import NoReturn

import torch
from torch import Tensor, nn

from ddpcore.parameters.flat import FlatParameters, gradient_of, version_of
from ddpcore.parameters.hooks import exclude_from_compilation

_SAMPLE = 2  # parameters that are compared: the one whose gradient has just come tells nothing
_ALIKE = 4  # steps: so many norms are equal by no accident
_MOST = 64  # steps that are compared
_ONE_PASS = "no_sync() for all its backward passes but the last; checkpoints: use_reentrant=False"
Noted = dict[int, tuple[weakref.ref[Tensor], int]]  # a gradient and its version, by its parameter's id


class ResetWatch:
    """Notes, when a backward pass begins, of which learners the gradients of the last step are gone, or set to zero.

    The next step reads the result: a loop may reset each learner just before its own pass, or measure one learner in
    between and then reset all.

    Args:
        flat: the parameters of all learners. Their hooks hold this object, so it holds none of them.
    """

    def __init__(self, flat: FlatParameters) -> None:
        self._flat, self._num_rows = weakref.ref(flat), flat.num_rows
        self.current = -1  # autograd's number of the current backward pass
        self.whole = -1  # of the last one in which the gradients of all came together
        self.noted: Noted = {}  # gradients after a learner's last pass
        self._versions: list[int] = []  # of those of all, where all lie in the flat buffer; ``noted`` has later ones
        self._sample: list[list[int]] = []  # for each of some parameters its index of each learner
        self._known: dict[int, tuple[int, int]] = {}  # by index: id and version of the gradient after the last pass
        self._reset: set[int] = set()  # learners

    def restart(self) -> None:
        """Forget the last step."""
        self._sample, self._reset, self._known = [], set(), {}

    def _read(self) -> dict[int, tuple[int, int]]:
        flat, indices = self._flat(), [index for own in self._sample for index in own]
        grads = [] if flat is None else [flat.parameters[index].grad for index in indices]
        if all(map(is_, grads, repeat(None))):
            return {}
        pairs = zip(indices, grads, strict=True)
        return {index: (id(grad), grad._version) for index, grad in pairs if grad is not None}

    def _end_pass(self) -> None:
        self._known = self._read()

    def begin_step(self) -> None:
        """After a step: choose parameters that have a gradient of every learner."""
        flat = self._flat()
        assert flat is not None
        num, parameters = len(flat.segments), flat.parameters
        places = (list(range(segment, num * self._num_rows, num)) for segment in range(num))
        held = (own for own in places if all(parameters[index].grad is not None for index in own))
        self._sample, self._reset = list(islice(held, _SAMPLE)), set()
        self._known = self._read()

    def note(self, parameter: Tensor | None = None) -> None:
        """A gradient has come, perhaps the first one of a backward pass; None: the gradients of all come together."""
        if (current := torch._C._current_graph_task_id()) != self.current:
            self.current = current
            self._begin_pass(parameter)

    def note_whole(self) -> None:
        """The gradients of all have come together."""
        self.whole = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(self.note_all)  # a penalty may add to some till then

    def note_all(self) -> None:
        """Note the gradients of all."""
        if (flat := self._flat()) is None:
            return
        grads = list(map(gradient_of, flat.parameters))
        if flat.grad_start is not None and all(map(is_, grads, flat.grad_views)):
            self.noted, self._versions = {}, list(map(version_of, grads))
        else:
            pairs = zip(flat.index, grads, strict=True)
            self.noted |= {key: (weakref.ref(grad), grad._version) for key, grad in pairs if grad is not None}

    def check_changed(self, flat: FlatParameters) -> bool:
        """Whether gradients have changed since they were noted; RuntimeError: of some learners. It clears the notes."""
        noted, versions = self.noted, self._versions
        self.noted, self._versions = {}, []
        if not noted and not versions:
            return False
        grads = list(map(gradient_of, flat.parameters))
        if versions:
            if not noted and all(map(is_, grads, flat.grad_views)) and list(map(version_of, grads)) == versions:
                return False
            views = zip(flat.index, map(weakref.ref, flat.grad_views), versions, strict=True)
            noted = {key: (ref, version) for key, ref, version in views} | noted
        num, rows = len(flat.segments), dict[int, list[int]]()  # learners by segment
        for index in _changed(flat, grads, noted):
            rows.setdefault(index % num, []).append(index // num)
        known = Counter(flat.index[key] % num for key in noted)
        for segment in sorted(rows):
            if len(rows[segment]) < known[segment]:
                name, learners = flat.names[segment], ", ".join(map(str, sorted(rows[segment])))
                what = f"the gradients of learner {learners} alone were changed after the backward pass"
                advice = "do what the loop does to a model, such as clipping by min(1, c / norm)"
                raise RuntimeError(f"parameter {name}: {what}: {advice}, for each of handle.models ({_ONE_PASS})")
        return bool(rows)

    def hook(self) -> Callable[[Tensor], None]:
        """A hook of a parameter, called after its gradient came, which it notes."""
        exclude_from_compilation(sys.modules[__name__], "_note", recursive=False)
        return partial(_note, self)

    def _begin_pass(self, first: Tensor | None) -> None:
        if (flat := self._flat()) is None:
            return
        is_noted = bool(self._versions) or id(first) in self.noted
        if is_noted and all(one.grad is None or one is first for one in flat.parameters):
            self.noted, self._versions = {}, []  # after zero_grad() in place of a step
        if not self._sample:
            return
        torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
        now = self._read()
        if not now and self._known:  # all were reset
            self._reset.update(range(self._num_rows))
            return
        for own in self._sample:
            others = [(row, index) for row, index in enumerate(own) if flat.parameters[index] is not first]
            grads = [(row, flat.parameters[i].grad) for row, i in others if now.get(i, 0) != self._known.get(i)]
            reset = [row for row, grad in grads if grad is None or not bool(grad.any())]
            is_whole = len(others) == self._num_rows or len(self._sample) == 1
            self._reset.update(range(self._num_rows) if is_whole and len(reset) == len(others) else reset)

    def check(self) -> None:
        """Before a step. RuntimeError: gradients of some learners were reset, and other learners' gradients add up."""
        if 0 < len(self._reset) < self._num_rows:
            learners = ", ".join(map(str, sorted(self._reset)))
            why = "as zero_grad() of its model does, and other learners' gradients add up"
            advice = "call optimizer.zero_grad(), or zero_grad() of each of handle.models"
            raise RuntimeError(f"gradients of learner {learners} alone were reset after the last step, {why}: {advice}")


def _changed(flat: FlatParameters, grads: Sequence[Tensor | None], noted: Noted) -> list[int]:
    """The indices of the gradients that are others than those noted, or have changed since then.

    Gradients of a learner's weights that ``torch.cat`` or ``stack`` joined share a version: the last of them noted it.
    """
    found, kept, written = list[int](), list[int](), list[int]()
    for key, (ref, version) in noted.items():
        index = flat.index[key]
        if (grad := grads[index]) is None or grad is not ref():
            found.append(index)
        else:
            (kept if version_of(grad) == version else written).append(index)
    if not written:
        return found

    def place(index: int) -> tuple[object, ...]:
        grad, row = grads[index], index // len(flat.segments)
        assert grad is not None
        shares = grad.layout == torch.strided and (flat.grad_start is None or grad is not flat.grad_views[index])
        return (row, grad.untyped_storage().data_ptr(), grad._version) if shares else (index,)

    last = set(map(place, kept))
    return found + [index for index in written if place(index) not in last]


def _note(resets: ResetWatch, parameter: Tensor) -> None:
    if (current := torch._C._current_graph_task_id()) == resets.whole:
        return
    if current != resets.current:
        resets.note(parameter)
    if (grad := parameter.grad) is not None:
        resets.noted[id(parameter)] = weakref.ref(grad), grad._version


def refuse_lacking(name: str, lacking: list[int], num_rows: int, *, is_late: bool) -> NoReturn:
    """Raise RuntimeError: these learners had no pass that averages, which others had, or had after the average."""
    rows, others = (", ".join(str(i) for i in range(num_rows) if (i in lacking) is known) for known in (True, False))
    if is_late:
        what = f"{name}: the gradients of learner {others} alone were changed by a backward pass after the average"
        raise RuntimeError(f"{what}, and learner {rows} had none: run one of each ({_ONE_PASS})")
    what = f"{name}: learner {rows} had no backward pass outside of no_sync(), so nothing was averaged"
    raise RuntimeError(f"{what}: run the last pass of each learner outside of it")


def check_modes(models: Sequence[nn.Module], rows: Sequence[Sequence[Tensor]]) -> None:
    """Before a step, with the parameters of each learner: RuntimeError if learner 0 alone has another mode.

    A program may go on to use the model that it gave to ``distribute``.
    """
    pairs = zip(models, rows, strict=True)
    first, *others = [([m.training for m in one.modules()], [p.requires_grad for p in row]) for one, row in pairs]
    if first != others[0] and others.count(others[0]) == len(others):
        what = "requires_grad_()" if first[0] == others[0][0] else "train() or eval()"
        raise RuntimeError(
            f"{what} was called for learner 0 alone, or all but it: call it on handle.model, or each of handle.models"
        )


def check_norms(norms: list[Tensor], rows: Sequence[Sequence[Tensor]]) -> None:
    """Before a step whose gradients a loop has changed, with the parameters of each learner. It adds to ``norms``.

    RuntimeError: in the first steps the norm of all gradients stays the same and each learner's norm changes. So the
    norm of all was clipped. Averaged gradients are equal, and nothing tells this from a smaller norm for each.
    """
    held = [[one.grad for one in row if one.grad is not None and not one.grad.is_sparse] for row in rows]
    if len(norms) == _MOST or not all(held):
        return
    norms.append(torch.stack([torch.stack(torch._foreach_norm(own)).double().square().sum() for own in held]).cpu())
    last_SL = torch.stack(norms[-_ALIKE:])  # squared, of some steps
    total, changes = float(last_SL[0].sum()), last_SL.diff(dim=0).abs().amax(dim=1)
    is_same = bool(((last_SL.sum(dim=1) - total).abs() < 1e-5 * total).all())
    if len(last_SL) == _ALIKE and is_same and bool((changes > 1e-2 * total).all()):
        what = f"one norm of the gradients of all learners was {total**0.5:.4g} in {_ALIKE} steps"
        advice = "call handle.clip_grad_norm_(max_norm), which clips the gradients of each learner"
        raise RuntimeError(f"{what}, as clipping leaves it: {advice}")
