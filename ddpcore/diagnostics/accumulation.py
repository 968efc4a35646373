"""Statistics of one device: squared norms of the gradient of each backward pass of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ddpcore.diagnostics.passes import noise_sums, unscale_squared
from ddpcore.diagnostics.record_buffer import Measured, RecordBuffer
from ddpcore.diagnostics.series import MEASURED

DISJOINT = (
    "backward passes of this step reached different parameters, so a pass is not a batch: use one pass a batch, and "
    "use_reentrant=False for checkpointing"
)


class PassStatistics:
    """``NoiseStatistics`` of one device: in a measured step each backward pass counts as a learner."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        optimizer: torch.optim.Optimizer,
        record_buffer: RecordBuffer,
        every: int,
        scaler: torch.amp.GradScaler | None,
        loss_divisor: float,
    ) -> None:
        self._record_buffer, self._every, self._scaler, self._divisor = record_buffer, every, scaler, loss_divisor
        self._step = 0
        self._passes = MicroBatches(parameters, lambda: (self._step + 1) % every == 0)
        self._hook = optimizer.register_step_pre_hook(lambda *_: self._before_step())

    def close(self) -> None:
        """Remove all hooks."""
        self._passes.remove()
        self._hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """The number of steps so far."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any], order: Sequence[int]) -> None:
        """Restore :meth:`state_dict`."""
        self._step = state["step"]
        self._passes.begin_step()

    @torch.no_grad()
    def _before_step(self) -> None:
        self._step += 1
        if self._step % self._every == 0:
            begin = self._record_buffer.begin()
            result = Measured(self._step, self._passes.num_passes, MEASURED)
            result.reason = DISJOINT if self._passes.disjoint else ""
            if self._passes.num_passes > 1:
                own, mean = self._passes.sums()
                unscale = unscale_squared(self._scaler, own) * self._divisor**2
                result.own_TS, result.mean_TS = (own * unscale)[None], (mean * unscale)[None]
            self._record_buffer.end(result, begin)
        self._passes.begin_step()


class MicroBatches:
    """Squared norms of the gradients of several backward passes, and of their mean.

    Gradients accumulate in ``.grad``, so the gradient of a pass is the difference to a copy from before it; only
    measured steps make the copy. If something else writes a gradient between two passes (``zero_grad()`` before the
    batch is repeated), earlier passes are discarded. Gradients must be zero or None before the first pass of a step.

    Args:
        parameters: all of one dtype and device.
        wanted: whether this step is measured.

    Attributes:
        num_passes: backward passes of this step so far.
        disjoint: whether two consecutive passes had no parameter in common, so a pass is not a whole batch.
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
        """Discard the passes so far."""
        self.num_passes = 0
        self.disjoint = False
        self._reached: set[int] = set()  # ids of parameters that this pass reached, and the previous one
        self._reached_before: set[int] = set()
        self._versions: dict[int, int] = {}  # of each gradient after its last pass
        self._was_written = False
        self._before: Tensor | None = None
        self._squares: Tensor | None = None

    def remove(self) -> None:
        """Remove the hooks of the parameters."""
        for handle in self._handles:
            handle.remove()

    def sums(self) -> tuple[Tensor, Tensor]:
        """Mean over passes of the squared norm of a gradient, and squared norm of the mean: each float64 ``[S]``."""
        assert self._before is not None and self._squares is not None
        mean = noise_sums([self._before], self.bounds)[:, 0, 0]
        return self._squares / self.num_passes, mean / self.num_passes**2

    def _hook(self, parameter: Tensor) -> None:
        if not self._wanted():
            return
        assert parameter.grad is not None
        key, version = id(parameter), parameter.grad._version
        if not parameter.grad._is_view():  # a pass adds one to the version; all views of a tensor share its version
            self._was_written |= key in self._versions and version != self._versions[key] + 1
        self._versions[key] = version
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass = current
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._reached.add(key)

    @torch.no_grad()
    def _end(self) -> None:
        if self._was_written:
            reached, versions = self._reached, self._versions
            self.begin_step()
            self._reached, self._versions = reached, versions
        self.disjoint |= self.num_passes > 0 and self._reached.isdisjoint(self._reached_before)
        self._reached, self._reached_before = set(), self._reached
        parts = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in self._parameters]
        row = torch.cat(parts)
        squares = noise_sums([row], self.bounds, self._before)[:, 0, 0]
        self._squares = squares if self._squares is None else self._squares + squares
        self._before = row
        self.num_passes += 1
