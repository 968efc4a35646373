"""Local SGD."""

from __future__ import annotations

from typing import ClassVar

from ddpcore.learner import Learner
from ddpcore.strategies.base import Strategy


class LocalSGD(Strategy):
    r"""Local SGD (Stich 2019): learners step alone and average their weights every H steps.

    ``w_j(t+1) = v_j(t+1)`` or, where H divides t+1, ``1/n sum_k v_k(t+1)``, with ``v_j(t+1) = w_j(t) - a g_j(w_j(t))``.
    Momentum stays local.

    Args:
        period: H, local steps between two averages; 1 averages after every step.
    """

    name: ClassVar[str] = "local_sgd"

    def __init__(self, period: int = 8) -> None:
        if period < 1:
            raise ValueError(f"local_sgd: period is {period}, it must be at least 1 step")
        self.period = period

    def after_step(self, learner: Learner) -> None:
        """Average the weights when the period ends."""
        if learner.step % self.period == 0:
            learner.comm.average_(learner.flat.param_LP).wait()
