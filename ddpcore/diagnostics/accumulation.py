"""One device: the gradient of each backward pass of a step, told apart from what had accumulated before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ddpcore.diagnostics.passes import noise_sums


class MicroBatches:
    """Squared norms of the gradients of several backward passes, and of their mean.

    Gradients accumulate in ``.grad``: the last pass's is the difference to the one before. The copy that this takes is
    made only where ``wanted()`` says so. Gradients must be zero, or None, before the first pass of a step.

    Args:
        parameters: all of one dtype and device.
        wanted: whether this step is measured.
    """

    def __init__(self, parameters: Sequence[Parameter], wanted: Callable[[], bool]) -> None:
        self._parameters, self._wanted = parameters, wanted
        self.bounds = [0]
        for parameter in parameters:
            self.bounds.append(self.bounds[-1] + parameter.numel())
        self._pass = -1
        self._handles = [p.register_post_accumulate_grad_hook(self._hook) for p in parameters if p.requires_grad]
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the passes so far."""
        self.num_passes = 0
        self._before: Tensor | None = None
        self._squares: Tensor | None = None

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def sums(self) -> tuple[Tensor, Tensor]:
        """Mean over passes of the squared norm of a gradient, and squared norm of the mean: each float64 ``[S]``."""
        assert self._before is not None
        assert self._squares is not None
        mean = noise_sums([self._before], self.bounds)[:, 0, 0]
        return self._squares / self.num_passes, mean / self.num_passes**2

    def _hook(self, parameter: Tensor) -> None:
        if not self._wanted():
            return
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass = current
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @torch.no_grad()
    def _end(self) -> None:
        parts = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in self._parameters]
        row = torch.cat(parts)
        squares = noise_sums([row], self.bounds, self._before)[:, 0, 0]
        self._squares = squares if self._squares is None else self._squares + squares
        self._before = row
        self.num_passes += 1
