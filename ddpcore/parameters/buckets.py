"""Hooks that report the parts of the gradient buffer that are complete during the backward pass."""

import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ddpcore.parameters.flat import LARGE, FlatParameters
from ddpcore.parameters.hooks import exclude_from_compilation, node_hooks, num_hooks, refuse_compiled_autograd, weakly
from ddpcore.parameters.shards import is_laid_out, local

Pieces = Iterator[tuple[int, Sequence[Tensor]]]
"""The columns of a message in parts: each has the number of its first column, and rows as ``ops.average_`` takes."""


def messages(flat: FlatParameters) -> list[tuple[int, int]]:
    """Columns ``[begin, end)`` of ``flat.grad_LP`` that are sent together: buckets that one parameter completes.

    They depend on the layout and not on the actual order of the gradients, so all ranks send identical messages.
    """
    found: dict[int, tuple[int, int]] = {}  # by the segment that completes them
    for begin, end in flat.buckets:
        last = max(index for index, segment in enumerate(flat.segments) if segment.offset < end)
        found[last] = found.get(last, (begin, end))[0], end
    return list(found.values())


def _is_alone(parameter: Tensor) -> bool:
    """Whether no program, graph or other tensor holds the memory of ``.grad``, so that its values may be replaced."""
    if parameter.grad is None or parameter.grad.layout != torch.strided or sys.getrefcount(parameter.grad) > _ALONE:
        return False
    return torch._C._storage_Use_Count(parameter.grad.untyped_storage()._cdata) <= 2


_probe = torch.zeros(1, requires_grad=True, dtype=torch.float32, device="cpu")
_probe.grad = torch.zeros_like(_probe)
_ALONE = sys.getrefcount(_probe.grad)  # of a gradient that only its parameter holds


class GradientBuckets:
    """Calls ``on_message`` for each message of ``flat.grad_LP`` when it is complete, always in the same order.

    The first gradient starts a backward pass. At its end, missing gradients count as zero, the remaining messages
    follow, and ``on_end`` is called before ``backward()`` returns, so gradients can be clipped right after it. While
    ``paused`` is true, gradients accumulate locally. Hooks have a weak reference: the caller must keep this object.

    Args:
        on_message: gets columns ``[L, n]`` of ``flat.grad_LP``, one or more buckets: see :func:`messages`. With
            ``in_place`` it also gets the gradients where they lie, as :data:`Pieces`.
        on_end: gets the indices of the segments in the order of their gradients. With several learners a segment is
            complete when every learner has its gradient.
        waits: whether all messages follow at the end of the pass, because nothing is sent meanwhile. Small gradients
            are then gathered together.
        in_place: whether ``on_message`` takes gradients where they lie: then, with ``waits``, large ones stay there.
    """

    def __init__(
        self,
        flat: FlatParameters,
        on_message: Callable[..., None],
        on_end: Callable[[list[int]], None],
        *,
        waits: bool = False,
        in_place: Callable[[], bool] = lambda: False,
    ) -> None:
        self.flat, self.waits, self._in_place, self._on_pass = flat, waits, in_place, flat.before_gradients
        self._own: dict[int, Tensor] = {}  # large gradients outside of flat.grad_LP, by the parameter's index
        self.paused, self.is_open = False, False
        self.num_paused = 0  # gradients that came while paused, since the last average
        self._on_message, self._on_end = on_message, on_end
        self._pass = self._noted = -1  # autograd's numbers of the current backward pass, and of the last one
        self._whole = -1  # of the last one in which all gradients came together
        self._late: set[int] = set()  # ids of parameters whose gradient is final at the end of a pass only
        self._not_last: list[Tensor] = []  # parameters that have a later hook of a program
        self._num_hooks = -1  # of this process, when _late was read
        exclude_from_compilation(GradientBuckets, "_begin", "_gather", "_end", "_add", "_note")  # in compiled loops
        exclude_from_compilation(GradientBuckets, "_hook", recursive=False)
        hook = weakly(self._hook)
        flat.before_gradients = self._note
        flat.on_gradients.append(self._add)
        self._handles = {id(p): p.register_post_accumulate_grad_hook(hook) for p in flat.parameters}
        self.rebuild()

    def rebuild(self) -> None:
        """Read the layout of ``flat`` again, after ``flat.reorder``."""
        self.messages = messages(self.flat)
        spans = [(one.offset, one.offset + one.numel) for one in self.flat.segments]
        inside = [[begin < last and first < end for begin, end in self.messages] for first, last in spans]
        self._messages_of = [[place for place, is_in in enumerate(row) if is_in] for row in inside]  # by segment
        self._sizes = list(map(sum, zip(*inside, strict=True)))  # in segments, by message
        self.restart()

    @property
    def lacking_rows(self) -> list[int]:
        """The rows without a backward pass, if others had one since the last :meth:`restart`."""
        return [row for row in range(self.flat.num_rows) if self._rows and row not in self._rows]

    def _hook(self, parameter: Tensor) -> None:
        if (current := torch._C._current_graph_task_id()) == self._whole:
            return
        gradient = parameter.grad
        if current != self._noted:
            self._note(parameter)
        if self.paused or gradient is None:  # torch also calls hooks of a parameter that was frozen meanwhile
            self.num_paused += self.paused
            return
        index = self.flat.index[id(parameter)]
        row, segment = divmod(index, len(self._num_missing))
        if current != self._pass:
            self._begin(current, row in self._rows)
        elif index in self._seen:
            return
        if gradient.requires_grad:
            what = "create_graph=True: the averaged gradient has no graph, so second derivatives would be lost"
            advice = "take torch.autograd.grad(loss, parameters, create_graph=True) for them, and backward() without it"
            raise RuntimeError(f"{what}: {advice}")
        self._seen.add(index)
        self._rows.add(row)
        if not self.waits or (gradient.numel() >= LARGE and not self._takes):
            del gradient  # gather_grad counts references
            self._gather(parameter, index)
            return
        self._num_missing[segment] -= 1
        if not self._num_missing[segment]:
            self._order.append(segment)

    def _note(self, first: Tensor | None = None) -> None:
        """The first gradient of a pass has come, also while paused. None: those of all come together."""
        if (current := torch._C._current_graph_task_id()) == self._noted:
            return
        self._noted = current
        if self._on_pass is not None:
            self._on_pass(first)
        may_begin = self._rows and (self.paused or not self.is_open)
        if may_begin and all(one.grad is None or one is first for one in self.flat.parameters):
            self.restart()  # the program has reset all gradients: a step was left out

    @torch.no_grad()
    def _gather(self, parameter: Tensor, index: int) -> None:
        if not self._runs_last(parameter) or id(parameter) in self._late:  # a later hook may change the gradient
            return
        gradient = parameter.grad
        if not is_laid_out(parameter, gradient):  # ranks of a learner add it at the end of the pass, in one order
            return
        if gradient is self.flat.grad_views[index] and local(gradient).data_ptr() != self.flat.grad_pointers[index]:
            self.flat.renew_grad_views()  # the program has set grad.data
        del gradient  # gather_grad counts references
        self.flat.gather_grad(index)
        self._sent.add(index)
        segment = index % len(self._num_missing)
        self._num_missing[segment] -= 1
        if self._num_missing[segment]:
            return
        self._order.append(segment)
        if not self.waits:
            for place in self._messages_of[segment]:
                self._missing[place] -= 1
            while self._num_sent < len(self.messages) and not self._missing[self._num_sent]:
                self._send_next()

    def _begin(self, current: int, is_new: bool) -> None:
        """A backward pass begins, of a new step or of another learner. The one before may have raised an error."""
        refuse_compiled_autograd()
        if self.waits and self.is_open:
            what = "the backward pass runs on the graph of an earlier pass that failed, or inside another one"
            advice = "call zero_grad() and the model again; checkpoints need use_reentrant=False"
            raise RuntimeError(f"{what}, so its gradients are wrong: {advice}")
        self._pass, self._takes = current, self._in_place()  # whether large gradients of this pass stay where they lie
        if is_new:
            self.restart()
        self.is_open = True
        if self._num_hooks != num_hooks():
            self._late = {id(p) for p in self.flat.parameters if not p.requires_grad or node_hooks(p, "register_hook")}
            self._num_hooks = num_hooks()
        # autograd runs this after the whole pass. DistributedDataParallel and FSDP use the same call.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _add(self) -> None:
        """All parameters have gradients. More may follow, so they are final at the end of the pass."""
        if self.paused:
            self.num_paused += 1
            return
        if (current := torch._C._current_graph_task_id()) != self._pass:
            self._begin(current, bool(self._rows))
        self._whole = current
        self._seen.update(range(len(self.flat.parameters)))
        self._rows.update(range(self.flat.num_rows))

    def _runs_last(self, parameter: Tensor) -> bool:
        """Whether this hook, as torch calls them in their order, is the last one that can change the gradient.

        If not, the gradient is sent at the end of this pass, after which this hook becomes the last one.
        """
        if next(reversed(parameter._post_accumulate_grad_hooks)) == self._handles[id(parameter)].id:
            return True
        self._not_last.append(parameter)
        return False

    @torch.no_grad()
    def _end(self) -> None:
        num, self.is_open = len(self.flat.segments), False
        for parameter in self._not_last:  # now, because FSDP2 iterates over the hooks when it calls them
            hooks, own = parameter._post_accumulate_grad_hooks, self._handles[id(parameter)].id
            hooks[own] = hooks.pop(own)
        self._not_last.clear()
        if len(self._rows) < self.flat.num_rows:
            return  # the other learners have their backward passes later
        if self.waits and tuple(map(Tensor.data_ptr, self.flat.grad_views)) != self.flat.grad_pointers:
            self.flat.renew_grad_views()  # the program has set grad.data
        self._own = self._own_grads()
        self.flat.gather_grads(left=self._sent | self._own.keys())
        self._order += sorted({index % num for index in self._seen}.difference(self._order))
        while self._num_sent < len(self.messages):
            self._send_next()
        self._own, self.num_paused = {}, 0
        self._on_end(self._order)

    def finish_without_pass(self) -> None:
        """Send zeros, as a backward pass that gives no parameter a gradient."""
        self.restart()
        self._rows.update(range(self.flat.num_rows))
        self._end()

    def restart(self) -> None:
        """Forget the gradients that were seen: those that follow are of a new step."""
        self.is_open = False  # a backward pass has begun and has not ended; it stays True if that pass fails
        self._order: list[int] = []  # segments, when their last row was complete
        self._seen: set[int] = set()  # indices of parameters with a gradient of this pass
        self._sent: set[int] = set()  # those whose gradient is final
        self._rows: set[int] = set()  # learners that had a backward pass
        self._num_missing = [self.flat.num_rows] * len(self.flat.segments)  # rows without a final gradient, by segment
        self._missing = list(self._sizes)  # segments without a final gradient, by message
        self._num_sent = 0  # messages of this step

    def _send_next(self) -> None:
        begin, end = self.messages[self._num_sent]
        self._num_sent += 1
        pieces = [self._pieces(begin, end)] if self.waits and self._in_place() else []
        self._on_message(self.flat.grad_LP[:, begin:end], *pieces)

    def _own_grads(self) -> dict[int, Tensor]:
        """The large gradients that may be averaged where they lie, because nothing else holds their memory."""
        if not self.waits or not self._in_place():
            return {}
        large = ((index, one) for index, one in enumerate(self.flat.parameters) if one.numel() >= LARGE)
        shared = {index for index, parameter in large if not _is_alone(parameter)}
        return {index: gradient for index, gradient in self.flat.own_grads(LARGE).items() if index not in shared}

    def _pieces(self, begin: int, end: int) -> Pieces:
        flat, own, num = self.flat, self._own, len(self.flat.segments)
        outside = {index % num for index in own}
        ranges = [(place, s.offset, s.offset + s.numel) for place, s in enumerate(flat.segments) if place in outside]
        for segment, start, stop in [*ranges, (num, end, end)]:
            first, last = (max(begin, min(bound, end)) for bound in (start, stop))
            if begin < first:
                yield begin, [flat.grad_LP[:, begin:first]]
            if first < last:
                pairs = zip(range(segment, num * flat.num_rows, num), flat.grad_LP[:, first:last], strict=True)
                yield first, [own[place][first - start : last - start] if place in own else row for place, row in pairs]
            begin = last
