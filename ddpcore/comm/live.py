"""Weights that learners average in pairs at any time, without an order of operations and without waiting.

Shapes: L learners of this process, P elements of a learner's weights. A row is ``[K, P]``: the weights, and their
double if K = 2, see :mod:`ddpcore.comm.meeting`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.meeting import Job, flow_, meet_


class LiveWeights(ABC):
    """The weights w_i of all learners, beside their models."""

    @abstractmethod
    def meet(self, learner: int, peer: int, job: Job) -> None:
        """``w_i, w_j <- (w_i + w_j) / 2``; ``w_i <- w_i + step of the job``: atomic. The next job begins at w_i.

        The doubles move with them. If i is its own peer, nothing is averaged.

        Args:
            learner: i, held by this process.
            peer: j, any learner.
            job: of i.
        """

    @abstractmethod
    def flow(self, learner: int, eta: float, time: float) -> None:
        """Let the weights and the double of a learner held here approach each other during ``time``: atomic."""

    @abstractmethod
    def rows(self) -> Tensor:
        """A copy ``[L, K, P]`` of the rows of the learners held here."""

    def own(self) -> Tensor:
        """A copy ``[L, P]`` of the weights of the learners held here."""
        return self.rows()[:, 0]

    @abstractmethod
    def settle(self) -> None:
        """Wait until no learner is in :meth:`meet`, because all have come here. Collective."""

    @abstractmethod
    def load(self, rows_LKP: Tensor) -> None:
        """Overwrite the rows of the learners held here. Collective."""


def first_rows(weights_LP: Tensor, alpha: float | None) -> Tensor:
    """New rows ``[L, K, P]``, with a double unless alpha is None. It begins as a copy of the weights."""
    return weights_LP[:, None].repeat(1, 1 if alpha is None else 2, 1)


class LocalLiveWeights(LiveWeights):
    """The weights of all learners, where one process holds all of them."""

    def __init__(self, weights_LP: Tensor, alpha: float | None) -> None:
        self._rows_LKP, self._alpha = first_rows(weights_LP, alpha), alpha

    @override
    @torch.no_grad()
    def meet(self, learner: int, peer: int, job: Job) -> None:
        rows = self._rows_LKP
        meet_(rows[learner], None if peer == learner else rows[peer], job, self._alpha)

    @override
    def flow(self, learner: int, eta: float, time: float) -> None:
        flow_(self._rows_LKP[learner], eta, time)

    @override
    def rows(self) -> Tensor:
        return self._rows_LKP.clone()

    @override
    def settle(self) -> None:
        return

    @override
    def load(self, rows_LKP: Tensor) -> None:
        self._rows_LKP.copy_(rows_LKP)
