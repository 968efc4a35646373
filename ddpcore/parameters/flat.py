"""Parameters and gradients as views of flat buffers, one row a learner.

Shapes: L learners held by this process, P elements of one learner's buffer (padding included), S shape of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import Parameter

from ddpcore.ops import WeightAverage
from ddpcore.parameters.bucket_plan import plan_buckets

ALIGNMENT = 16  # elements: every parameter, row and bucket starts on a vector boundary
MiB = 2**20
Allocate = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
_BufferViews = tuple[Tensor, tuple[Tensor, ...], tuple[int, ...]]  # a buffer of weights, its views, and their addresses


@dataclass(frozen=True)
class Segment:
    """Where one parameter lies in a learner's row: ``row[offset : offset + numel]`` with its own strides."""

    name: str
    offset: int
    numel: int
    shape: torch.Size
    stride: tuple[int, ...]


class FlatParameters:
    """Moves the given parameters, and their gradients, into contiguous ``[L, P]`` buffers and leaves views behind.

    The ``Parameter`` objects stay the same, and so do their values, strides (``channels_last`` too), order, and
    ``state_dict``. ``.grad`` stays None until a gradient is gathered.

    Args:
        parameters: (name, parameter) pairs as ``model.named_parameters()`` gives them; those that need no gradient
            are left alone. A parameter that appears twice (tied weights) is taken once.
        stack: None gives one row (L = 1) and keeps every parameter's shape S. A number L makes every parameter the
            stack ``[L, *S]`` of L virtual learners, all starting from the same values.
        bucket_bytes: largest bucket of the averaged gradients.
        first_bucket_bytes: the first bucket, smaller so that communication starts early.
        allocate: makes the zeros ``(shape, dtype, device)`` of the buffers; called again, alike, by :meth:`reorder`.

    Raises:
        ValueError: no parameters, parameters on two devices or of two dtypes, on the meta device, sparse, complex, not
            dense, or overlapping in memory.
    """

    param_LP: Tensor
    grad_LP: Tensor

    def __init__(
        self,
        parameters: Iterable[tuple[str, Parameter]],
        *,
        stack: int | None = None,
        bucket_bytes: int = 25 * MiB,
        first_bucket_bytes: int = MiB,
        allocate: Allocate | None = None,
    ) -> None:
        if stack is not None and stack < 1:
            raise ValueError(f"stack is {stack}: it must be at least 1 learner")
        named = _unique_trainable(parameters)
        _check(named)
        self.stack = stack
        self._new = _zeros if allocate is None else allocate
        # Gradients come about in the reverse of the order in which parameters are used, which is a first guess at the
        # reverse of the order in which they were registered. reorder() makes it exact.
        self.names = tuple(name for name, _ in reversed(named))
        self.parameters = tuple(parameter for _, parameter in reversed(named))
        self.segments = _lay_out(self.names, [(p.shape, p.stride()) for p in self.parameters])
        values = [parameter.detach() for parameter in self.parameters]
        gradients = [parameter.grad for parameter in self.parameters]
        self._allocate_params(values[0].dtype, values[0].device)
        self._allocate_grads()
        itemsize = self.param_LP.element_size()
        self.buckets: tuple[tuple[int, int], ...] = tuple(
            plan_buckets(self.numel, bucket_bytes // itemsize, first_bucket_bytes // itemsize, ALIGNMENT)
        )
        for index, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
            self.param_views[index].copy_(value)  # to every row
            self._attach_param(index)
            self._attach_grad(index, gradient)

    @property
    def numel(self) -> int:
        """P: elements of one row, padding included. Padding is zero and stays zero."""
        return self.param_LP.shape[1]

    def views_of(self, buffer_LP: Tensor) -> tuple[Tensor, ...]:
        """One view a parameter, in the order of ``segments``, of any buffer laid out like ``param_LP``."""
        if self.stack is None:
            return tuple(buffer_LP[0].as_strided(s.shape, s.stride, _start(buffer_LP, s)) for s in self.segments)
        return tuple(
            buffer_LP.as_strided((self.stack, *s.shape), (buffer_LP.stride(0), *s.stride), _start(buffer_LP, s))
            for s in self.segments
        )

    def average_(self, average: WeightAverage) -> None:
        """Average the rows, and continue in the buffer to which the average writes."""
        average.apply_(self.param_LP)
        self.move_to(average.out)

    def move_to(self, row: Tensor | None) -> None:
        """Point the parameters at another row ``[P]``, which already holds the weights. None changes nothing."""
        if row is None or row.data_ptr() == self.param_LP.data_ptr():
            return
        if row.data_ptr() not in self._places:
            self._places[row.data_ptr()] = self._place_at(row[None])
        self._live_at(self._places[row.data_ptr()])
        for parameter, view in zip(self.parameters, self.param_views, strict=True):
            parameter.data = view

    def gather_grads(self, left: Container[int] = ()) -> bool:
        """Bring every ``.grad`` into ``grad_LP`` and leave the views in their place.

        Args:
            left: indices of parameters whose gradients stay where they are; their part of ``grad_LP`` means nothing.

        Returns:
            Whether every parameter has a gradient. Others keep ``None``, and their part of ``grad_LP`` is zero.
        """
        views, gradients, missing = [], [], []
        for index, (parameter, view) in enumerate(zip(self.parameters, self.grad_views, strict=True)):
            gradient = parameter.grad
            if gradient is view or index in left:
                continue
            if gradient is None:
                missing.append(view)
            elif gradient.is_sparse:
                raise RuntimeError(_SPARSE)
            else:
                views.append(view)
                gradients.append(gradient)
                parameter.grad = view
        if views:
            torch._foreach_copy_(views, gradients)
        if missing:
            torch._foreach_zero_(missing)
        return not missing

    def own_grads(self, min_numel: int) -> dict[int, Tensor]:
        """Gradients that autograd left outside of ``grad_LP``: by index, rows ``[1, n]`` laid out like their weights.

        None of virtual learners, and none below ``min_numel`` elements.
        """
        return {
            index: gradient.as_strided((1, segment.numel), (segment.numel, 1))
            for index, (parameter, segment) in enumerate(zip(self.parameters, self.segments, strict=True))
            if segment.numel >= min_numel
            and self.stack is None
            and (gradient := parameter.grad) is not None
            and gradient is not self.grad_views[index]
            and gradient.layout == torch.strided
            and gradient.stride() == segment.stride
        }

    def gather_grad(self, index: int) -> None:
        """The same as :meth:`gather_grads` for one parameter."""
        parameter, view = self.parameters[index], self.grad_views[index]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad.is_sparse:
            raise RuntimeError(_SPARSE)
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view

    def reorder(self, order: Sequence[int]) -> None:
        """Lay the parameters out anew: ``order[i]`` is today's index of the parameter that comes i-th.

        Values and gradients move along, one buffer after the other: the old weights are gone before the new gradients
        take memory. Buckets keep their boundaries and so hold other parameters.
        """
        if sorted(order) != list(range(len(self.segments))):
            raise ValueError("order must name every parameter once")
        if list(order) == list(range(len(order))):
            return
        values = [self.param_views[index] for index in order]
        gradients = [self.parameters[index].grad for index in order]
        self.names = tuple(self.names[index] for index in order)
        self.parameters = tuple(self.parameters[index] for index in order)
        self.segments = _lay_out(self.names, [(self.segments[i].shape, self.segments[i].stride) for i in order])
        self._allocate_params(self.param_LP.dtype, self.param_LP.device)
        for index, value in enumerate(values):
            self.param_views[index].copy_(value)
            self._attach_param(index)
        del value, values
        self._allocate_grads()
        for index, gradient in enumerate(gradients):
            self._attach_grad(index, gradient)

    def _allocate_params(self, dtype: torch.dtype, device: torch.device) -> None:
        last = self.segments[-1]
        self._places: dict[int, _BufferViews] = {}
        self._live_at(self._place_at(self._new((self.stack or 1, _aligned(last.offset + last.numel)), dtype, device)))

    def _place_at(self, rows_LP: Tensor) -> _BufferViews:
        views = self.views_of(rows_LP)
        return rows_LP, views, tuple(view.data_ptr() for view in views)

    def _live_at(self, place: _BufferViews) -> None:
        self.param_LP, self.param_views, self.param_pointers = place

    def _allocate_grads(self) -> None:
        self.grad_LP = self._new(self.param_LP.shape, self.param_LP.dtype, self.param_LP.device)
        self.grad_views = self.views_of(self.grad_LP)

    def _attach_param(self, index: int) -> None:
        parameter = self.parameters[index]
        parameter.grad = None
        parameter.data = self.param_views[index]

    def _attach_grad(self, index: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.grad_views[index].copy_(gradient)
            self.parameters[index].grad = self.grad_views[index]


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


_SPARSE = "a gradient is sparse and flat buffers are dense: use nn.Embedding(sparse=False)"


def _start(buffer_LP: Tensor, segment: Segment) -> int:
    return int(buffer_LP.storage_offset()) + segment.offset


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def _lay_out(names: Sequence[str], layouts: Sequence[tuple[torch.Size, tuple[int, ...]]]) -> tuple[Segment, ...]:
    segments, offset = [], 0
    for name, (shape, stride) in zip(names, layouts, strict=True):
        segments.append(Segment(name, offset, shape.numel(), shape, tuple(stride)))
        offset += _aligned(shape.numel())
    return tuple(segments)


def _unique_trainable(parameters: Iterable[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
    seen: dict[int, tuple[str, Parameter]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            seen.setdefault(id(parameter), (name, parameter))
    return list(seen.values())


def _is_dense(tensor: Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda d: (d[1], d[0])):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _check(named: Sequence[tuple[str, Parameter]]) -> None:
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
            raise ValueError(
                f"parameters are on two devices ({first_name} on {first.device}, {name} on {parameter.device}): "
                "move the model to one device"
            )
        if parameter.dtype != first.dtype:
            raise ValueError(
                f"parameters have two dtypes ({first_name} is {first.dtype}, {name} is {parameter.dtype}): "
                "convert the model to one"
            )
        if not parameter.is_floating_point():
            raise ValueError(f"parameter {name} is {parameter.dtype}: flat buffers take real floating-point parameters")
        if not _is_dense(parameter):
            raise ValueError(
                f"parameter {name} is not dense in memory: use parameter.data = parameter.data.contiguous()"
            )
        start = parameter.data_ptr()
        spans.append((start, start + parameter.numel() * parameter.element_size(), name))
    spans.sort()
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise ValueError(f"parameters {name} and {other} share memory: tie weights by sharing one Parameter object")
