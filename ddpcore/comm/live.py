"""Weights that learners average in pairs at any time, without an order of operations and without waiting.

Shapes: L learners of this process, P elements of a learner's weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.reductions import meet_


class LiveWeights(ABC):
    """The weights w_i of all learners, beside their models."""

    @abstractmethod
    def meet(self, learner: int, peer: int, step_P: Tensor, out_P: Tensor) -> None:
        """``w_i, w_j <- (w_i + w_j) / 2``; ``w_i <- w_i + step``; ``out <- w_i``: atomic.

        If i is its own peer, nothing is averaged.

        Args:
            learner: i, held by this process.
            peer: j, any learner.
            step_P: added to w_i.
            out_P: overwritten with w_i.
        """

    @abstractmethod
    def own(self) -> Tensor:
        """A copy ``[L, P]`` of the weights of the learners held here."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until no learner is in :meth:`meet`, because all have come here. Collective."""

    @abstractmethod
    def load(self, weights_LP: Tensor) -> None:
        """Overwrite the weights of the learners held here. Collective."""


class LocalLiveWeights(LiveWeights):
    """The weights of all learners, where one process holds all of them."""

    def __init__(self, weights_LP: Tensor) -> None:
        self._weights_LP = weights_LP.clone()

    @override
    @torch.no_grad()
    def meet(self, learner: int, peer: int, step_P: Tensor, out_P: Tensor) -> None:
        meet_(self._weights_LP[learner], None if peer == learner else self._weights_LP[peer], step_P, out_P)

    @override
    def own(self) -> Tensor:
        return self._weights_LP.clone()

    @override
    def settle(self) -> None:
        return

    @override
    def load(self, weights_LP: Tensor) -> None:
        self._weights_LP.copy_(weights_LP)
