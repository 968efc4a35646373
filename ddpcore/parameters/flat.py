"""Parameters and gradients as views of flat buffers, one row per learner.

Shapes: L learners of this process, P elements of one learner's row (with padding), S the shape of a parameter.
"""

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ddpcore.ops import WeightAverage
from ddpcore.parameters.hooks import HookWatch
from ddpcore.parameters.shards import Shards, laid_out, local

ALIGNMENT = 16  # elements; every parameter, row and bucket starts at a multiple of it, a vector boundary
LARGE = 2**16  # a gradient of so many elements gets its own kernel call, which costs less than a copy into grad_LP
MiB = 2**20
_NOBODY = 0, -1
Allocate = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
_OF_GRADIENTS = ("grad_LP", "grad_views", "grad_pointers", "_grad_stacks")  # attributes that need the buffer
gradient_of, is_trained, version_of = attrgetter("grad"), attrgetter("requires_grad"), attrgetter("_version")
_Layout = tuple[torch.Size, tuple[int, ...]]  # shape and strides
_BufferViews = tuple[Tensor, tuple[Tensor, ...], tuple[int, ...]]  # a weight buffer, its views, their addresses


@dataclass(frozen=True)
class Segment:
    """A parameter's place in a row, ``row[offset : offset + numel]`` with its strides; padding ends at ``end``."""

    name: str
    offset: int
    end: int
    numel: int
    shape: torch.Size
    stride: tuple[int, ...]


class FlatParameters:
    """Moves parameters and gradients into contiguous ``[L, P]`` buffers, of which they become views.

    Row j belongs to learner j. The ``Parameter`` objects, their values, strides (also ``channels_last``), order and
    ``state_dict`` stay the same. ``.grad`` stays None until a gradient is gathered.

    Args:
        learners: for each learner ``model.named_parameters()``, alike for all. Those that need no gradient are left
            alone. One that appears twice (tied weights) is taken once.
        bucket_bytes, first_bucket_bytes: the sizes of the largest bucket of gradients and of the first one, which
            starts communication earlier if it is smaller.
        allocate: returns zeros of ``(shape, dtype, device)`` for the buffers. :meth:`reorder` calls it again.
        shards: if all parameters are DTensors, of one learner. The buffers hold their local parts then, and
            ``grad_views`` are DTensors.
        sends_gradients: whether other ranks get columns of ``grad_LP``. Else it is allocated when something reads it.

    ``names`` and ``segments`` are of one learner's parameters, in the order of the row. ``parameters`` are of all
    learners, learner 0 first; ``param_views`` and ``grad_views`` have their order.

    ValueError: there are no parameters, they have two devices or dtypes, or one is on the meta device, sparse, complex,
    of 8 bits, not dense, a wrapper of other tensors, or overlaps another one in memory.
    """

    param_LP: Tensor
    grad_LP: Tensor
    grad_views: tuple[Tensor, ...]
    grad_pointers: tuple[int, ...]  # addresses of grad_views
    grad_start: int | None  # the address of grad_LP; None while it is not allocated
    index: dict[int, int]  # of each parameter, by its id
    before_gradients: Callable[..., None] | None = None  # called in add_gradients, before it adds
    on_gradients: list[Callable[[], None]]  # called after add_gradients

    def __init__(
        self,
        learners: Sequence[Iterable[tuple[str, Parameter]]],
        *,
        bucket_bytes: int = 25 * MiB,
        first_bucket_bytes: int = MiB,
        allocate: Allocate | None = None,
        shards: Shards | None = None,
        sends_gradients: bool = True,
    ) -> None:
        self.on_gradients = []
        self._lent_to = _NOBODY  # id of the forward pass whose backward pass, of this number, writes in grad_LP
        self.shards, self._sends_gradients = shards, sends_gradients
        rows = [_unique_trainable(parameters) for parameters in learners]
        for named in rows:
            _check_parameters([(name, local(parameter)) for name, parameter in named])
        self.num_rows = len(rows)
        self._new = allocate or _zeros
        # The backward pass computes gradients roughly in the reverse order of registration. reorder() corrects it.
        self.names = tuple(name for name, _ in reversed(rows[0]))
        self.parameters = tuple(parameter for named in rows for _, parameter in reversed(named))
        itemsize = self.parameters[0].element_size()
        locals_ = self.locals(self.parameters)
        sizes = bucket_bytes // itemsize, first_bucket_bytes // itemsize
        plan_buckets(0, *sizes)  # refuses sizes before anything moves
        layouts = [(part.shape, part.stride()) for part in locals_[: len(self.names)]]
        values = [part.detach() for part in locals_]
        del locals_
        self._move(values, [parameter.grad for parameter in self.parameters], layouts)
        self._hooks = HookWatch(self.parameters)
        self.buckets = tuple(plan_buckets(self.numel, *sizes))

    @property
    def numel(self) -> int:
        """P: the elements of one row, with padding. Padding is zero between two steps."""
        return self.param_LP.shape[1]

    def clear_padding(self) -> None:
        """Set the padding of the weights to zero, after something was added to whole rows."""
        torch._foreach_zero_([self.param_LP[:, one.offset + one.numel : one.end] for one in self.segments])

    def locals(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The parts of DTensors on this rank."""
        return tensors if self.shards is None else list(map(local, tensors))

    def views_of(self, buffer_LP: Tensor) -> tuple[Tensor, ...]:
        """One view per parameter, in the order of ``parameters``, of any buffer with the layout of ``param_LP``."""
        start, step = int(buffer_LP.storage_offset()), buffer_LP.stride(0)
        places = ((start + row * step, s) for row in range(len(buffer_LP)) for s in self.segments)
        return tuple(buffer_LP.as_strided(s.shape, s.stride, begin + s.offset) for begin, s in places)

    def stacks_of(self, buffer_LP: Tensor) -> tuple[Tensor, ...]:
        """One view ``[L, *S]`` per segment, of all learners, of any buffer with the layout of ``param_LP``."""
        num, start, step = len(buffer_LP), int(buffer_LP.storage_offset()), buffer_LP.stride(0)
        return tuple(buffer_LP.as_strided((num, *s.shape), (step, *s.stride), start + s.offset) for s in self.segments)

    def offsets_of(self, parameters: Sequence[Tensor]) -> list[int]:
        """The index in its row of the first element of each of these parameters."""
        return [self.segments[self.index[id(parameter)] % len(self.segments)].offset for parameter in parameters]

    def average_(self, average: WeightAverage) -> None:
        """Average the rows. If the average has another output row, the parameters become views of that row."""
        average.apply_(self.param_LP)
        self.move_to(average.out)

    def move_to(self, row: Tensor | None) -> None:
        """Point the parameters at another row ``[P]`` that already holds the weights. None changes nothing."""
        if row is None or row.data_ptr() == self.param_LP.data_ptr():
            return
        if row.data_ptr() not in self._known_views:
            self._known_views[row.data_ptr()] = self._views_at(row[None])
        self._repoint(self._known_views[row.data_ptr()])

    @contextmanager
    def at(self, weights_LP: Tensor) -> Iterator[None]:
        """Inside, the parameters are views of other rows ``[L, P]``. Their own rows keep memory and values."""
        own = self.param_LP, self.param_views, self.param_pointers
        self._repoint(self._views_at(weights_LP))
        try:
            yield
        finally:
            self._repoint(own)

    def gather_grads(self, left: Container[int] = ()) -> bool:
        """Copy every ``.grad`` into ``grad_LP`` and replace it by its view. Returns whether every parameter has one.

        A missing one stays None, and its part of ``grad_LP`` is zero. Parts with an index in ``left`` are undefined.
        Collective over a learner whose gradients are laid out in another way than their parameters.
        """
        if all(map(is_, map(gradient_of, self.parameters), self.grad_views)):
            return True
        places, missing = list[int](), list[int]()
        for index, (parameter, view) in enumerate(zip(self.parameters, self.grad_views, strict=True)):
            gradient = parameter.grad
            if gradient is view or index in left:
                continue
            if gradient is not None and gradient.is_sparse:
                raise RuntimeError(_SPARSE)
            (missing if gradient is None else places).append(index)
        del gradient, view  # _detach_kept_grads counts references
        self._detach_kept_grads([*places, *missing])
        if places:
            found = [laid_out(self.parameters[index], self.parameters[index].grad) for index in places]
            # A gradient in the flat buffer, as another learner's gradient is, must be copied first.
            gradients = [one.clone() if self._is_inside(one) else one for one in found]
            torch._foreach_copy_([local(self.grad_views[index]) for index in places], gradients)
            for index in places:
                self.parameters[index].grad = self.grad_views[index]
        if missing:
            torch._foreach_zero_([local(self.grad_views[index]) for index in missing])
        return not missing

    def _is_inside(self, gradient: Tensor) -> bool:
        start = self.grad_start or self.grad_LP.data_ptr()
        return start <= gradient.data_ptr() < start + self.grad_LP.nbytes

    def add_gradients(self, parameters: Sequence[Tensor], grads: Sequence[Tensor | None], one: object) -> bool:
        """Add all learners' gradients, ``[L, *S]`` of each segment, to ``grad_LP``, as autograd adds each to ``.grad``.

        ``parameters`` is the attribute of this name, when the graph of the forward pass ``one`` was made. Returns False
        if autograd must do it, and nothing has changed: a gradient is missing, a parameter was frozen, or has a hook or
        a ``.grad`` of its own, or the layout has changed.
        """
        given = [grad for grad in grads if grad is not None]
        if parameters is not self.parameters or len(given) < len(grads):
            return False
        is_lent = self._is_lent_to(one)
        if not is_lent and self._lent_to != _NOBODY:
            return False
        gradients = list(map(gradient_of, parameters))
        is_new = all(map(is_, gradients, repeat(None)))
        if not is_new and (is_lent or not all(map(is_, gradients, self.grad_views))):
            return False
        if not is_lent and not self._may_write(is_new):
            return False
        if self.before_gradients is not None:
            self.before_gradients()
        self._lent_to = _NOBODY
        pairs = [(stack, grad) for stack, grad in zip(self._grad_stacks, given, strict=True) if grad is not stack]
        if pairs:
            stacks, others = zip(*pairs, strict=True)
            (torch._foreach_copy_ if is_new else torch._foreach_add_)(stacks, others)
        torch.autograd.graph.increment_version(self.grad_views)
        if is_new:
            for parameter, view in zip(parameters, self.grad_views, strict=True):
                parameter.grad = view
        for call in self.on_gradients:
            call()
        return True

    def _may_write(self, is_new: bool) -> bool:
        """Whether gradients may go to ``grad_LP`` without autograd. What the program keeps of them is moved first."""
        if is_new:
            self._detach_kept_grads(range(len(self.parameters)))
        if self._hooks.may_act(self.parameters) or not all(map(is_trained, self.parameters)):
            return False
        return self.has_grads_in_place()

    def lend_grads(self, one: object) -> dict[int, Tensor]:
        """The gradients ``[L, *S]`` by segment, for layers of a forward pass to write once in its backward pass.

        They are lent while no parameter has a gradient and :meth:`add_gradients` would copy the results; else empty.
        """
        if self._lent_to != _NOBODY or not all(map(is_, map(gradient_of, self.parameters), repeat(None))):
            return {}
        if not self._may_write(True):
            return {}
        self._lent_to = id(one), torch._C._current_graph_task_id()
        return dict(enumerate(self._grad_stacks))

    def _is_lent_to(self, one: object) -> bool:
        return self._lent_to == (id(one), torch._C._current_graph_task_id())

    def forget_loan(self) -> None:
        """Outside of backward passes: one that failed may have some of the gradients."""
        if torch._C._current_graph_task_id() == -1:
            self._lent_to = _NOBODY

    def take_back(self, grads: Sequence[Tensor | None], one: object) -> Sequence[Tensor | None]:
        """End the loan to a pass. Its gradients get memory of their own where they were written in ``grad_LP``."""
        if not self._is_lent_to(one):
            return grads
        self._lent_to = _NOBODY
        return [grad.clone() if grad is not None and self._is_inside(grad) else grad for grad in grads]

    def _detach_kept_grads(self, indices: Iterable[int]) -> None:
        """Give a gradient that the program keeps (``kept = p.grad``) memory of its own before the next is written."""
        counts = list(map(sys.getrefcount, self.grad_views))
        if max(counts) <= _UNUSED:
            return
        views = list(self.grad_views)
        for index in indices:
            if counts[index] > _UNUSED:
                kept = views[index]
                if self.shards is None:
                    views[index] = kept.data
                    kept.data = kept.data.clone()
                else:
                    views[index] = self.shards.gradient(self.parameters[index], local(kept))
                    kept._local_tensor = local(kept).clone()  # type: ignore[attr-defined]
        self.grad_views = tuple(views)

    def own_grads(self, min_numel: int) -> dict[int, Tensor]:
        """Gradients outside of ``grad_LP`` with the layout of their weights: rows ``[n]`` by parameter index.

        One of fewer than ``min_numel`` elements is left out: a copy into ``grad_LP`` costs less than a kernel call.
        """
        large = [(place, segment) for place, segment in enumerate(self.segments) if segment.numel >= min_numel]
        if not large or self.shards is not None:
            return {}
        num, gradients = len(self.segments), list(map(gradient_of, self.parameters))
        return {
            index: gradient.as_strided((segment.numel,), (1,))
            for place, segment in large
            for index in range(place, len(gradients), num)
            if (gradient := gradients[index]) is not None
            and gradient is not self.grad_views[index]
            and gradient.layout == torch.strided
            and gradient.stride() == segment.stride
            and not self._is_inside(gradient)
        }

    def gather_grad(self, index: int) -> None:
        """Do the same as :meth:`gather_grads` for one parameter."""
        parameter = self.parameters[index]
        gradient = parameter.grad
        if gradient is self.grad_views[index]:
            return
        if sys.getrefcount(self.grad_views[index]) > _UNUSED:
            self._detach_kept_grads([index])
        view = self.grad_views[index]
        if gradient is None:
            local(view).zero_()
        elif gradient.is_sparse:
            raise RuntimeError(_SPARSE)
        else:
            local(view).copy_(local(gradient))
            parameter.grad = view

    def reorder(self, order: Sequence[int]) -> None:
        """Change the order of the segments: ``order[i]`` is the present index of the new i-th one, in every row.

        Values and gradients are moved, one buffer after the other, so that the old weights are freed before the new
        gradients are allocated. Buckets keep their boundaries, and so get other parameters.
        """
        num = len(self.segments)
        if sorted(order) != list(range(num)):
            raise ValueError("order must contain the index of every parameter once")
        if list(order) == list(range(len(order))):
            return
        places = [row * num + index for row in range(self.num_rows) for index in order]
        values = [self.param_views[place] for place in places]
        gradients = [self.parameters[place].grad for place in places]
        self.names = tuple(self.names[index] for index in order)
        self.parameters = tuple(self.parameters[place] for place in places)
        self._move(values, gradients, [(self.segments[i].shape, self.segments[i].stride) for i in order])

    def renew_grad_views(self) -> None:
        """Make new views of ``grad_LP``. Each has its own version counter, which shows a change of this view alone."""
        self.grad_views = tuple(view.data for view in self.views_of(self.grad_LP))
        self.grad_pointers = tuple(map(Tensor.data_ptr, self.grad_views))
        self._grad_strides = tuple(map(Tensor.stride, self.grad_views))
        if self.shards is not None:
            self.grad_views = tuple(map(self.shards.gradient, self.parameters, self.grad_views))
        self._grad_stacks = self.stacks_of(self.grad_LP)

    def has_grads_in_place(self) -> bool:
        """Whether the program has neither set ``grad.data`` nor transposed a gradient in place."""
        parts = self.locals(self.grad_views)
        is_in_place = tuple(map(Tensor.data_ptr, parts)) == self.grad_pointers
        return is_in_place and tuple(map(Tensor.stride, parts)) == self._grad_strides

    def _move(self, values: list[Tensor], gradients: list[Tensor | None], layouts: Sequence[_Layout]) -> None:
        """Allocate the buffers, and make parameters and gradients views of them. Empties ``values``."""
        firsts = self.parameters[: len(self.names)]
        rooms = [s.numel() for s, _ in layouts] if self.shards is None else list(map(self.shards.room, firsts))
        bounds = pairwise(accumulate((-(-room // ALIGNMENT) * ALIGNMENT for room in rooms), initial=0))
        places = zip(self.names, bounds, layouts, strict=True)
        self.segments = tuple(Segment(name, *both, s.numel(), s, tuple(stride)) for name, both, (s, stride) in places)
        self.index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._known_views: dict[int, _BufferViews] = {}
        rows_LP = self._new((self.num_rows, self.segments[-1].end), values[0].dtype, values[0].device)
        self.param_LP, self.param_views, self.param_pointers = self._views_at(rows_LP)
        for parameter, value, view in zip(self.parameters, values, self.param_views, strict=True):
            view.copy_(value)
            parameter.grad = None
            self._put(parameter, view)
        del value
        values.clear()  # frees the old weights before the gradients are allocated
        for name in _OF_GRADIENTS:
            vars(self).pop(name, None)
        self.grad_start = None
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        if self._sends_gradients:
            self.gather_grads()

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_GRADIENTS:
            raise AttributeError(name)
        self._allocate_gradients()
        return vars(self)[name]

    def _allocate_gradients(self) -> None:
        new = self._new if self._sends_gradients else _zeros  # the first may wait for other ranks
        self.grad_LP = new(self.param_LP.shape, self.param_LP.dtype, self.param_LP.device)
        self.grad_start = self.grad_LP.data_ptr()
        self.renew_grad_views()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "before_gradients": None, "on_gradients": []}  # a copy has no watchers

    def _views_at(self, rows_LP: Tensor) -> _BufferViews:
        views = self.views_of(rows_LP)
        return rows_LP, views, tuple(view.data_ptr() for view in views)

    def _repoint(self, place: _BufferViews) -> None:
        self.param_LP, self.param_views, self.param_pointers = place
        torch.clear_autocast_cache()  # it holds the weights of before, cast
        for parameter, view in zip(self.parameters, self.param_views, strict=True):
            self._put(parameter, view)

    def _put(self, parameter: Tensor, view: Tensor) -> None:
        if self.shards is None:
            parameter.data = view
        else:
            self.shards.move(parameter, view)


# What sys.getrefcount says of a view that only a tuple holds.
_UNUSED = max(map(sys.getrefcount, (torch.zeros(0, dtype=torch.float32, device="cpu"),)))
_SPARSE = "a gradient is sparse and flat buffers are dense: use nn.Embedding(sparse=False)"


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def plan_buckets(numel: int, size: int, first_size: int) -> list[tuple[int, int]]:
    """Cut ``[0, numel)`` into a bucket of at most ``first_size`` elements and buckets of at most ``size`` elements.

    Cuts are multiples of ``ALIGNMENT``, a size below which is a ValueError. A large tensor has several buckets.
    """
    if min(size, first_size) < ALIGNMENT:
        raise ValueError(f"a bucket must have at least {ALIGNMENT} elements, the alignment")
    size, first = (one // ALIGNMENT * ALIGNMENT for one in (size, first_size))
    return list(pairwise([*([0, *range(first, numel, size)] if numel else []), numel]))


def _unique_trainable(parameters: Iterable[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
    seen: dict[int, tuple[str, Parameter]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            seen.setdefault(id(parameter), (name, parameter))
    return list(seen.values())


def _check_parameters(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ValueError, as :class:`FlatParameters`, for parameters that cannot be views of one buffer."""
    if not named:
        raise ValueError("the model has no parameter that needs a gradient: there is nothing to train")
    first_name, first = named[0]
    spans = []
    for name, parameter in named:
        if parameter.layout != torch.strided:
            raise ValueError(f"parameter {name} is sparse: flat buffers take dense parameters only")
        if parameter.is_meta:
            raise ValueError(f"parameter {name} is on the meta device: materialise the model first (model.to_empty)")
        if parameter.device != first.device:
            what = f"parameters are on two devices ({first_name} on {first.device}, {name} on {parameter.device})"
            raise ValueError(f"{what}: move the model to one device")
        if parameter.dtype != first.dtype:
            what = f"parameters have two dtypes ({first_name} is {first.dtype}, {name} is {parameter.dtype})"
            raise ValueError(f"{what}: convert the model to one")
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            takes = "flat buffers take real floating-point parameters of 16 to 64 bits"
            advice = "convert it, or freeze it with requires_grad_(False)"
            raise ValueError(f"parameter {name} is {parameter.dtype}: {takes}: {advice}")
        if getattr(parameter, "grad_dtype", parameter.dtype) not in (None, parameter.dtype):  # not in each torch
            what = f"parameter {name} is {parameter.dtype} and has grad_dtype {parameter.grad_dtype}"
            raise ValueError(f"{what}: leave grad_dtype out: a flat buffer keeps gradients in the dtype of weights")
        if parameter.numel() and not parameter.data_ptr():
            raise ValueError(f"parameter {name} wraps other tensors ({type(parameter).__name__}): train a plain tensor")
        # Only where no element overlaps another one or a gap, torch gives a new tensor the same strides.
        if parameter.numel() and torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            advice = "use parameter.data = parameter.data.contiguous()"
            raise ValueError(f"parameter {name} is not dense in memory: {advice}")
        spans.append((parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, name))
    for (_, end, name), (start, _, other) in pairwise(sorted(spans)):
        if start < end:
            raise ValueError(f"parameters {name} and {other} share memory: tie weights by sharing one Parameter object")
