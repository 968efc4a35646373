"""Which part of the gradients is complete during backward, and who is told."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddpcore.flat import FlatParameters
from ddpcore.plans import BucketTracker


class GradientBuckets:
    """Calls back for each bucket of ``flat.grad_LP`` as soon as it is complete, always in the same order.

    A backward pass starts with its first gradient. When it has ended, what is still missing counts as zero, the
    remaining buckets are handed out, and ``on_end`` is called before ``backward()`` returns, so that gradients can be
    clipped right after it. Under ``paused`` gradients accumulate locally.

    Args:
        flat: the parameters. Their gradients become views of ``flat.grad_LP``.
        on_bucket: takes columns ``[L, n]`` of ``flat.grad_LP``.
        on_end: takes the parameters' indices in the order in which their gradients came.
    """

    def __init__(
        self, flat: FlatParameters, on_bucket: Callable[[Tensor], None], on_end: Callable[[list[int]], None]
    ) -> None:
        self.flat = flat
        self.paused = False
        self._on_bucket = on_bucket
        self._on_end = on_end
        self._pass = -1  # autograd's number of the backward pass that the marks belong to
        self._order: list[int] = []
        self._handles = [parameter.register_post_accumulate_grad_hook(self._hook) for parameter in flat.parameters]
        self.rebuild()

    def rebuild(self) -> None:
        """Take the layout of ``flat`` anew, after ``flat.reorder``."""
        ranges = [(s.offset, s.offset + s.numel) for s in self.flat.segments]
        self._tracker = BucketTracker(ranges, list(self.flat.buckets))
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
        for begin, end in self.flat.buckets[ready[0] : ready[1]]:
            self._on_bucket(self.flat.grad_LP[:, begin:end])
