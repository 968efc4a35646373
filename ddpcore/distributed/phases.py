"""A counter of a rank's own work and of its waiting, which always runs.

Seconds are those of the host: on a GPU, work counts where the host waits for it.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddpcore.distributed.spans import Spans
from ddpcore.parameters.hooks import is_compiled_autograd, own_hooks


class PhaseClock:
    """Counts the seconds of forward passes, backward passes and waiting of one rank since :meth:`restart`.

    Args:
        spans: of the strategy, whose seconds are waiting; None: torch averages at the end of the backward pass.
    """

    def __init__(self, spans: Spans | None = None) -> None:
        self._spans = spans
        self.restart()

    def restart(self) -> None:
        """Count from now."""
        self._start, self._mark = time.perf_counter(), (-1.0, 0.0)  # time and waiting at the start of a pass
        self.forward = self.backward = self._hidden = 0.0
        self._waited_before = 0.0 if self._spans is None else self._spans.seconds
        self.num_steps = 0

    @property
    def waited(self) -> float:
        """Seconds of waiting."""
        return self._hidden if self._spans is None else self._spans.seconds - self._waited_before

    def row(self) -> list[float]:
        """Steps, and seconds of forward passes, backward passes, the rest and waiting."""
        passes = self.forward, self.backward
        rest = time.perf_counter() - self._start - sum(passes) - self.waited
        return [float(self.num_steps), *passes, rest, self.waited]

    def _begin(self) -> None:
        self._mark = time.perf_counter(), self.waited

    def _end(self) -> float:
        """Seconds of own work since the mark, if there is one."""
        (began, waited), self._mark = self._mark, (-1.0, 0.0)
        return 0.0 if began < 0 else time.perf_counter() - began - (self.waited - waited)

    def begin_forward(self, *_: Any) -> None:
        """Before a forward pass. It is a hook, too."""
        if torch.is_grad_enabled():
            self._begin()

    def end_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """After a forward pass. The gradient of an output will begin the backward pass."""
        if self._mark[0] < 0:  # no pass of training
            return
        self.forward += self._end()
        self._is_last = getattr(module, "require_backward_grad_sync", True)  # False in no_sync() of torch
        output = next((one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad), None)
        if output is not None:
            with own_hooks():
                output.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: Tensor) -> None:
        if is_compiled_autograd():
            return  # it has no callback at the end of a pass
        self._begin()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """After the pass, and before the callbacks of DistributedDataParallel, which were queued later."""
        self.backward, self._ended = self.backward + self._end(), time.perf_counter()
        if self._spans is None:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_waiting)

    def _end_waiting(self) -> None:
        self._hidden += time.perf_counter() - self._ended
        self.num_steps += self._is_last
