"""Which part of the gradients is complete during backward, and who is told."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from ddpcore.parameters.bucket_plan import BucketTracker
from ddpcore.parameters.flat import FlatParameters


def messages(flat: FlatParameters) -> list[tuple[int, int]]:
    """Columns ``[begin, end)`` of ``flat.grad_LP`` that are sent together: neighbouring buckets of one moment are one.

    Buckets are cut anywhere, so a large parameter completes several at once, and each would cost a round of messages
    for nothing. The moments are those of a pass whose gradients come in the order of the layout, and not those of the
    pass at hand: ranks whose gradients come in other orders, or not at all, must still send the same messages.
    """
    tracker = BucketTracker(_ranges(flat), list(flat.buckets))
    ready = [tracker.mark(index) for index in range(len(flat.segments))]
    return [(flat.buckets[first][0], flat.buckets[end - 1][1]) for first, end in ready if first < end]


def _ranges(flat: FlatParameters) -> list[tuple[int, int]]:
    return [(s.offset, s.offset + s.numel) for s in flat.segments]


class GradientBuckets:
    """Calls back for each message of ``flat.grad_LP`` as soon as it is complete, always in the same order.

    Hooks do not keep it alive: whoever wants to be called back does.

    A backward pass starts with its first gradient. When it has ended, what is still missing counts as zero, the
    remaining messages are handed out, and ``on_end`` is called before ``backward()`` returns, so that gradients can be
    clipped right after it. Under ``paused`` gradients accumulate locally.

    Args:
        flat: the parameters. Their gradients become views of ``flat.grad_LP``.
        on_message: takes columns ``[L, n]`` of ``flat.grad_LP``, one or more buckets: see :func:`messages`.
        on_end: takes the parameters' indices in the order in which their gradients came.
    """

    def __init__(
        self, flat: FlatParameters, on_message: Callable[[Tensor], None], on_end: Callable[[list[int]], None]
    ) -> None:
        self.flat = flat
        self.paused = False
        self._on_message = on_message
        self._on_end = on_end
        self._pass = -1  # autograd's number of the backward pass that the marks belong to
        self._order: list[int] = []
        hook = _forgetful(self._hook)
        self._handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in flat.parameters]
        self.rebuild()

    def rebuild(self) -> None:
        """Take the layout of ``flat`` anew, after ``flat.reorder``."""
        self.messages = messages(self.flat)
        self._tracker = BucketTracker(_ranges(self.flat), self.messages)
        self._index = {id(parameter): index for index, parameter in enumerate(self.flat.parameters)}

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _hook(self, parameter: Tensor) -> None:
        if self.paused:
            return
        current = torch._C._current_graph_task_id()
        if current != self._pass:  # a new pass, also where the last one died on the way
            self._pass = current
            self._order.clear()
            self._tracker.reset()
            # The engine runs this once the whole pass is done; DistributedDataParallel and FSDP stand on the same call.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        index = self._index[id(parameter)]
        self.flat.gather_grad(index)
        self._order.append(index)
        self._hand_out(self._tracker.mark(index))

    @torch.no_grad()
    def _end(self) -> None:
        for index in set(range(len(self.flat.segments))).difference(self._order):
            self.flat.gather_grad(index)
        self._hand_out(self._tracker.finish())
        self._on_end(self._order)

    def _hand_out(self, ready: tuple[int, int]) -> None:
        for begin, end in self.messages[ready[0] : ready[1]]:
            self._on_message(self.flat.grad_LP[:, begin:end])


def _forgetful(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """The bound method as long as its object lives: Python cannot collect a cycle through a parameter's hooks."""
    known = weakref.WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        if (found := known()) is not None:
            found(parameter)

    return hook
