"""Which rank is slow: a counter of each rank's own work and of its waiting, which always runs.

Ranks that wait for each other have equal steps, so the time of a step names nobody. Seconds are those of the host: on a
GPU, work counts where the host waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median_low
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddpcore.distributed.spans import Spans
from ddpcore.parameters.hooks import own_hooks

PHASES = ("forward pass", "backward pass", "rest of the step")
LEAST_WAITING, LEAST_EXPLAINED = 0.1, 0.8  # of a step, and of the waiting


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank for which the others wait.

    Attributes:
        rank: its number.
        phase: one of ``PHASES``: where it loses most.
        excess: seconds of a step that its own work takes longer than that of the median rank.
        waiting: seconds of a step that the other ranks wait, on average.
        seconds: of a step.
    """

    rank: int
    phase: str
    excess: float
    waiting: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow in the {self.phase}: {1e3 * self.excess:.3g} ms a step more than the median "
            f"rank; the others wait {1e3 * self.waiting:.3g} of {1e3 * self.seconds:.3g} ms"
        )


def slow_ranks(own: Mapping[int, tuple[float, ...]], waiting: Mapping[int, float]) -> list[SlowRank]:
    """The ranks that explain at least 80 % of the others' waiting; none if these wait less than 10 % of a step.

    Args:
        own: of each rank, seconds a step of its own work by phase, in the order of ``PHASES``.
        waiting: of each rank, seconds a step in which it only waited.
    """
    sums = {rank: sum(phases) for rank, phases in own.items()}
    middle = median_low(sums.values())
    middles = [median_low(column) for column in zip(*own.values(), strict=True)]
    others = [waiting[rank] for rank in own if sums[rank] <= middle]
    mean, seconds = fmean(others), fmean([sums[rank] + waiting[rank] for rank in own])
    if mean < LEAST_WAITING * seconds:
        return []
    found = []
    for rank, total in sums.items():
        if total - middle >= LEAST_EXPLAINED * mean:
            lost = [mine - usual for mine, usual in zip(own[rank], middles, strict=True)]
            phase = PHASES[lost.index(max(lost))]
            found.append(SlowRank(rank=rank, phase=phase, excess=total - middle, waiting=mean, seconds=seconds))
    return found


class PhaseClock:
    """Counts the seconds of forward passes, backward passes and waiting of one rank. The first step is not counted.

    Attributes:
        forward, backward, waited: seconds since :meth:`restart`.

    Args:
        spans: of the strategy, whose seconds are waiting; None: torch averages at the end of the backward pass.
    """

    def __init__(self, spans: Spans | None = None) -> None:
        self._spans, self._is_first = spans, True
        self.restart()

    def restart(self) -> None:
        """Count from now."""
        self._start, self.num_steps = time.perf_counter(), 0
        self.forward = self.backward = self._hidden = 0.0
        self._before = self._in_spans()
        self._mark: tuple[float, float] | None = None  # time and waiting at the start of a pass
        self._has_ended = False  # whether a backward pass has ended since the last forward pass

    @property
    def waited(self) -> float:
        """Seconds of waiting."""
        return self._hidden + self._in_spans() - self._before

    def row(self) -> list[float]:
        """Steps, and seconds of forward, backward, the rest and waiting since :meth:`restart`."""
        rest = time.perf_counter() - self._start - self.forward - self.backward - self.waited
        return [float(self.num_steps + self._has_ended), self.forward, self.backward, rest, self.waited]

    def _in_spans(self) -> float:
        return 0.0 if self._spans is None else self._spans.total

    def _passed(self) -> float:
        """Seconds since the mark, without waiting."""
        assert self._mark is not None
        return time.perf_counter() - self._mark[0] - (self._in_spans() - self._mark[1])

    def begin_forward(self, *_: Any) -> None:
        """A forward pass begins. It is a hook, too."""
        if not torch.is_grad_enabled():
            return
        if self._has_ended:
            if self._is_first:
                self.restart()
                self._is_first = False
            else:
                self.num_steps += 1
            self._has_ended = False
        self._mark = time.perf_counter(), self._in_spans()

    def end_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """A forward pass ends. The gradient of an output begins the backward pass."""
        if self._mark is None or not torch.is_grad_enabled():
            return
        self.forward, self._mark = self.forward + self._passed(), None
        output = next((one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad), None)
        if output is not None:
            with own_hooks():
                output.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: Tensor) -> None:
        if self._mark is None:  # else another output of this pass
            self._mark = time.perf_counter(), self._in_spans()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """After the pass, and before the callbacks of DistributedDataParallel, which were queued later."""
        if self._mark is not None:
            self.backward += self._passed()
        self._mark, self._has_ended = None, True
        if self._spans is None:
            self._began = time.perf_counter()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_waiting)

    def _end_waiting(self) -> None:
        self._hidden += time.perf_counter() - self._began
