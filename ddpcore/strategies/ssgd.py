"""Synchronous SGD."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ddpcore.comm.base import Work
from ddpcore.strategies.base import Strategy
from ddpcore.strategies.learner import Learner


class SSGD(Strategy):
    r"""Synchronous SGD: every learner steps along the mean of all gradients, so all hold the same weights.

    ``w_a(t+1) = w_a(t) - a/n sum_k g_k(w_a(t))`` (Goyal et al. 2017, equation 2). Buckets of gradients are averaged
    while backward goes on; when it returns, ``.grad`` holds the mean, as under DistributedDataParallel.
    """

    name: ClassVar[str] = "ssgd"
    averages_gradients: bool = True

    def __init__(self) -> None:
        self._works: list[Work] = []

    def before_forward(self, learner: Learner) -> None:
        """Finish what a backward pass that died has left, and forget its gradients: ``.grad`` as by ``zero_grad``.

        Its averages are under way on all ranks. They write to the buffer that the next gradients go to.
        """
        if self._works:
            self.after_backward(learner)
            learner.flat.grad_LP.zero_()

    def bucket_ready(self, learner: Learner, columns: Tensor) -> None:
        """Start the average of the message.

        Raises:
            RuntimeError: a backward pass died and no forward pass has cleared up: on a graph that was kept.
        """
        is_first = columns.storage_offset() == learner.flat.grad_LP.storage_offset()
        if is_first and self._works:
            self.after_backward(learner)  # if a rank is gone, this says so
            raise RuntimeError(
                "a backward pass went over a graph that was kept from one that died, whose averages were under way: "
                "its gradients are mixed up, call zero_grad() and the model again"
            )
        self._works.append(learner.comm.average_(columns, learner.step))

    def after_backward(self, learner: Learner) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def after_step(self, learner: Learner) -> None:
        """Nothing: the weights agree."""

    def averages_weights_at(self, step: int) -> bool:
        """At every step: gradients are averaged."""
        return True

    def __repr__(self) -> str:
        return "SSGD()"
