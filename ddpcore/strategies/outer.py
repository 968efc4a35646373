"""The parts of outer steps: fragments of the weights, the anchor at which a round began, and its optimizer."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ddpcore.options.typed import check_range, typed
from ddpcore.parameters.flat import FlatParameters
from ddpcore.strategies.learner import Learner

MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]

Fragments = int | Sequence[Sequence[str]]
"""A number of fragments, or for each fragment the names of its modules and parameters."""


def outer_of(name: str, wanted: MakeOptimizer | Mapping[str, Any] | None) -> MakeOptimizer | None:
    """The outer optimizer of the strategy ``name``; a mapping has the settings of ``torch.optim.SGD``.

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


class Start:
    """The weights at which the first round begins: before the first forward pass that the strategy sees, or the step.

    ``rows_LP`` has a copy of them, ``[L, P]``, at first that of a saved state, if it had one. A program may load
    weights after that pass, or set them by hand before the first backward pass: then the round begins there.
    """

    def __init__(self, rows_LP: Tensor | None = None) -> None:
        self.rows_LP = rows_LP
        self._num_loads: int | None = None  # of trained parameters, when the rows were copied; None: a state had them

    def note(self, learner: Learner) -> Tensor:
        """Copy the weights, unless they are known."""
        num_loads, known = sum(learner.loaded[key] for key in learner.flat.index), self._num_loads
        if self.rows_LP is None or (known is not None and (known != num_loads or _are_set(learner, self.rows_LP))):
            self.rows_LP, self._num_loads = learner.flat.param_LP.clone(), num_loads
        return self.rows_LP


def _are_set(learner: Learner, rows_LP: Tensor) -> bool:
    """Whether the program has set weights before the first backward pass; ``max_norm`` scales rows of an embedding."""
    flat, scaled = learner.flat, set() if learner.watch is None else learner.watch.renormalized
    if learner.had_backward or any(parameter.grad is not None for parameter in flat.parameters):
        return False
    for parameter, now, then in zip(flat.parameters, flat.param_views, flat.views_of(rows_LP), strict=True):
        error = 4 * torch.finfo(now.dtype).eps if id(parameter) in scaled else 0.0
        own, old = (normalize(one, dim=-1) if error else one for one in (now, then))
        if not torch.allclose(own, old, rtol=0, atol=error):
            return True
    return False


class Anchor:
    """The outer optimizer, and the weights of A learners, which it steps.

    Where all learners average with all, they share one anchor (A = 1), which is equal on every rank. Where they average
    with neighbours, each learner has its own (A = L). ``make`` gets the parts of all learners, of one dimension.
    """

    def __init__(self, weights_AP: Tensor, parts: "Sequence[Part]", make: MakeOptimizer) -> None:
        rows_AP = weights_AP.detach()
        self._parts = [[row[begin:end].clone().requires_grad_() for row in rows_AP] for _, begin, end in parts]
        self._all = [part for rows in self._parts for part in rows]
        self._optimizer = make(self._all)

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
        return {"parts": [part.detach() for part in self._all], "optimizer": self._optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        for part, saved in zip(self._all, state["parts"], strict=True):
            part.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])


class Part(NamedTuple):
    """Columns ``begin`` to ``end`` of the flat buffer, which belong to a fragment."""

    fragment: int
    begin: int
    end: int


def check_fragments(fragments: Fragments, period: int) -> int:
    """The number of fragments. ValueError: there is none, there are more than steps, or one has no names."""
    lists = fragments if isinstance(fragments, Sequence) and not isinstance(fragments, str) else None
    for names in lists or ():
        if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
            what = f"local_sgd: fragments has {names!r}"
            raise ValueError(f"{what}: each fragment is a list of names of modules, such as ['layer1', 'layer2']")
    number: int = typed("local_sgd: fragments", fragments, int) if lists is None else len(lists)
    check_range("local_sgd: fragments", number, least=1, most=period)
    return number


def parts_of(flat: FlatParameters, fragments: Fragments) -> list[Part]:
    """The parts of all fragments, in the order of the buffer. No part cuts a parameter.

    A number of fragments divides the parameters, in the order of the buffer, into fragments of about the same size.

    ValueError: a parameter belongs to no fragment or to two, or a fragment has no parameter.
    """
    segments = flat.segments
    if isinstance(fragments, int):
        if fragments > len(segments):
            raise ValueError(f"local_sgd: fragments is {fragments} of {len(segments)} parameters: take fewer")
        owners = _by_size([whole.numel() for whole in flat.parameters[: len(segments)]], fragments)  # also of DTensors
    else:
        owners = [_by_name(segment.name, fragments) for segment in segments]
        for fragment, names in enumerate(fragments):
            if fragment not in owners:
                raise ValueError(f"local_sgd: fragments: no parameter is in {list(names)}: check the names")
    runs = groupby(zip(owners, segments, strict=True), key=itemgetter(0))
    inside = ((owner, [segment for _, segment in run]) for owner, run in runs)
    return [Part(owner, own[0].offset, own[-1].end) for owner, own in inside]


def _by_name(name: str, fragments: Sequence[Sequence[str]]) -> int:
    """The fragment of a parameter."""
    inside = [any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes) for prefixes in fragments]
    found = [number for number, is_inside in enumerate(inside) if is_inside]
    if len(found) != 1:
        where = f"fragments {' and '.join(map(str, found))}" if found else "no fragment"
        raise ValueError(f"local_sgd: fragments: parameter {name} is in {where}: name it, or its module, once")
    return found[0]


def _by_size(sizes: Sequence[int], number: int) -> list[int]:
    """The fragment of each parameter: where its middle lies, but so that no fragment is empty."""
    total, before, owners = sum(sizes), 0, [-1]
    for place, size in enumerate(sizes):
        wanted = int(number * (before + size / 2) / total)
        least = max(owners[-1], number - (len(sizes) - place))  # the parameters that are left must fill the rest
        owners.append(min(max(wanted, least), owners[-1] + 1))
        before += size
    return owners[1:]
