"""Where a rank's time goes: ranges of a strategy's calls, own work and waiting by phase, and which rank is slow.

Seconds are by the host's clock: on a GPU, work counts where the host waits for it.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from statistics import fmean, median_low
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddpcore.comm.base import Communicator
from ddpcore.parameters.hooks import is_compiled_autograd, own_hooks

_STARTS = ("before_forward", "bucket_ready")  # calls that may start a transfer and do not wait for it
_WAITS = ("after_backward", "before_step")  # calls that wait for it
PHASES = ("forward pass", "backward pass", "rest of the step")
LEAST_WAITING, LEAST_EXPLAINED = 0.1, 0.8  # of a step, and of the waiting


class PhaseClock:
    """Counts a rank's seconds of forward passes, backward passes and ``waiting``.

    Calls of the strategy that has ``comm`` are waiting; with None torch averages and waits at the end of the backward
    pass. ``overlapped`` are seconds between a call that started a transfer to other processes and the call that waited
    for it, without ``waiting``. So at most this much communication was hidden behind computation.
    """

    def __init__(self, comm: Communicator | None = None) -> None:
        self.waiting = self.overlapped = 0.0
        self._comm, self._has_others = comm, comm is not None and len(comm.learners) < comm.num_learners
        self._names: list[str] = []  # of the ranges that are open, the outermost first
        self._began, self._sent = 0.0, 0  # bytes: they say whether a call started a transfer
        self._open: tuple[float, float] | None = None  # the end of the range that started a transfer, seconds so far
        self.restart()

    def restart(self) -> None:
        """Begin a new count of steps, passes and :attr:`waited`. ``waiting`` and ``overlapped`` go on."""
        self._start, self._mark = time.perf_counter(), (-1.0, 0.0)  # time and waiting at the start of a pass
        self.forward = self.backward = 0.0
        self._before, self.num_steps = self.waiting, 0

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """The range of a call, ``ddpcore::name`` in torch's profiler. A range inside another one is counted once."""
        self._names.append(name)
        return self._profiled(name) if torch.autograd._profiler_enabled() else self

    @contextmanager
    def _profiled(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(f"ddpcore::{name}"), self:
            yield

    def __enter__(self) -> None:
        assert self._comm is not None
        if len(self._names) == 1:
            self._began, self._sent = time.perf_counter(), self._comm.bytes_sent

    def __exit__(self, *error: object) -> None:
        assert self._comm is not None
        name = self._names.pop()
        if self._names:
            return
        ended = time.perf_counter()
        if self._open is not None and name in _WAITS:
            since, seconds = self._open
            self.overlapped += self._began - since - (self.waiting - seconds)
            self._open = None
        self.waiting += ended - self._began
        if self._open is None and self._has_others and name in _STARTS and self._comm.bytes_sent > self._sent:
            self._open = ended, self.waiting

    @property
    def waited(self) -> float:
        """Seconds of waiting since the last restart."""
        return self.waiting - self._before

    def row(self) -> list[float]:
        """Steps, and seconds of forward passes, backward passes, the rest and waiting."""
        passes = self.forward, self.backward
        rest = time.perf_counter() - self._start - sum(passes) - self.waited
        return [float(self.num_steps), *passes, rest, self.waited]

    def _end(self) -> float:
        """Seconds of own work since the mark, if there is one."""
        (began, waited), self._mark = self._mark, (-1.0, 0.0)
        return 0.0 if began < 0 else time.perf_counter() - began - (self.waited - waited)

    def begin_forward(self, *_: Any) -> None:
        """Before a forward pass. It is a hook, too."""
        if torch.is_grad_enabled():
            self._mark = time.perf_counter(), self.waited

    def end_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """After a forward pass. The gradient of an output will begin the backward pass."""
        if self._mark[0] < 0:  # no pass of training
            return
        self.forward += self._end()
        self._is_last = getattr(module, "require_backward_grad_sync", True)  # False in no_sync() of torch
        leaves = [outputs] if isinstance(outputs, Tensor) else tree_leaves(outputs)
        output = next((one for one in leaves if isinstance(one, Tensor) and one.requires_grad), None)
        if output is not None:
            with own_hooks():
                output.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: Tensor) -> None:
        if is_compiled_autograd():
            return  # it has no callback at the end of a pass
        self._mark = time.perf_counter(), self.waited
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """After the pass, and before the callbacks of DistributedDataParallel, which were queued later."""
        self.backward, self._ended = self.backward + self._end(), time.perf_counter()
        if self._comm is None:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_waiting)

    def _end_waiting(self) -> None:
        self.waiting += time.perf_counter() - self._ended
        self.num_steps += self._is_last


class SlowRank(NamedTuple):
    """A rank for which the others wait, with seconds of a step."""

    rank: int
    phase: str  # one of PHASES: where it loses most
    excess: float  # own work beyond the median rank's
    waiting: float  # of the others, on average
    seconds: float  # in all

    def __str__(self) -> str:
        excess, waiting, seconds = (f"{1e3 * one:.3g}" for one in self[2:])
        return (
            f"rank {self.rank} is slow in the {self.phase}: {excess} ms a step more than the median rank; the others "
            f"wait {waiting} of {seconds} ms"
        )


def slow_ranks(own: Mapping[int, tuple[float, ...]], waiting: Mapping[int, float]) -> list[SlowRank]:
    """The ranks that explain at least 80 % of the others' waiting; none if these wait less than 10 % of a step.

    ``own`` are seconds a step of each rank's own work by phase, in the order of ``PHASES``, ``waiting`` of its waiting.
    """
    sums = {rank: sum(phases) for rank, phases in own.items()}
    middle, middles = median_low(sums.values()), [median_low(column) for column in zip(*own.values(), strict=True)]
    mean = fmean(waiting[rank] for rank in own if sums[rank] <= middle)
    seconds, found = fmean(sums[rank] + waiting[rank] for rank in own), []
    for rank, total in sums.items():
        if mean >= LEAST_WAITING * seconds and total - middle >= LEAST_EXPLAINED * mean:
            lost = [mine - usual for mine, usual in zip(own[rank], middles, strict=True)]
            found.append(SlowRank(rank, PHASES[lost.index(max(lost))], total - middle, mean, seconds))
    return found
