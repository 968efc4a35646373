"""What a strategy may ask of the learners' connection. Shapes: n learners in all, L of them held by this process."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.ops import Mixture, RowMixtures, WeightAverage
from ddpcore.topology.base import Topology
from ddpcore.topology.rounds import Round

Decode = Callable[[int, Tensor], Tensor]
"""Turns what a neighbour (its number) sent, ``[x]``, into its published weights ``[P]``."""


class Work(ABC):
    """A transfer in progress."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the result is in place. On CUDA: when the current stream will see it."""


class Done(Work):
    """A transfer that is complete."""

    @override
    def wait(self) -> None:
        return


class Exchange(ABC):
    """A transfer of neighbours' weights in progress. It is used once, by one of its three methods."""

    @abstractmethod
    def mixture(self) -> WeightAverage:
        """Wait, then return ``w <- W w``. The weights were sent unchanged, and have not changed since."""

    @abstractmethod
    def correction(self, published_LP: Tensor, factor: float, decode: Decode | None = None) -> WeightAverage:
        """Wait, then return ``w_j <- w_j + factor * sum_k W_jk (q_k - q_j)``, with the *published* rows q.

        Published rows are a copy of older weights, or what a codec made of the weights.

        Args:
            published_LP: q of the learners held here, as every neighbour sees it.
            factor: how far to go.
            decode: turns the rows that were sent into published rows; None where they are those.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Use none of it, and free its buffers, after a wait if they are still written to. Every rank calls this."""


class PeerExchange(Exchange):
    """An exchange that knows the rows of other processes by their learner's number.

    Args:
        learners: those held here.
        round_of: what a held learner averages in this step.
    """

    def __init__(self, learners: Sequence[int], round_of: Callable[[int], Round]) -> None:
        self.learners, self.round_of = learners, round_of

    @abstractmethod
    def received(self) -> Mapping[int, Tensor]:
        """Wait, then return the rows that other processes sent, by learner."""

    @override
    def mixture(self) -> WeightAverage:
        rows, round_ = self.received(), self.round_of(self.learners[0])
        return Mixture([rows[source] for source in round_.sources], round_.self_weight, round_.weights)

    @override
    def correction(self, published_LP: Tensor, factor: float, decode: Decode | None = None) -> WeightAverage:
        received = self.received()
        rows = received if decode is None else {source: decode(source, row) for source, row in received.items()}
        rows = {**rows, **dict(zip(self.learners, published_LP, strict=True))}
        mixtures = []
        for learner in self.learners:
            round_ = self.round_of(learner)
            weights = [factor * weight for weight in round_.weights]
            terms = [*(rows[source] for source in round_.sources), rows[learner]]
            mixtures.append(Mixture(terms, 1.0, [*weights, -sum(weights)]))
        return mixtures[0] if len(mixtures) == 1 else RowMixtures(mixtures)


class Communicator(ABC):
    """Connects n learners. Every process calls the same methods in the same order.

    Attributes:
        num_learners: n.
        learners: the learners whose rows this process holds, ascending.
        bytes_sent: by one learner so far: its weights to each neighbour, and the bytes of each average.
        description: what carries the bytes, for people.
    """

    num_learners: int
    learners: Sequence[int]
    bytes_sent: int = 0
    description: str

    def now(self) -> float:
        """Seconds on the clock by which training is timed. Every process calls this."""
        return time.perf_counter()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros, in the memory that the connection averages fastest. Every process calls this."""
        return torch.zeros(shape, dtype=dtype, device=device)

    @abstractmethod
    def broadcast_(self, rows: Tensor) -> None:
        """Overwrite the rows ``[L, x]`` of every learner with those of learner 0."""

    @abstractmethod
    def average_(self, rows: Tensor, step: int | None = None) -> Work:
        """Start to overwrite the rows ``[L, x]`` with the mean over all n learners. They must not change meanwhile.

        Rows of 16 bits are added in fp32 and rounded once, so equal learners stay equal.

        Args:
            rows: of the learners held here.
            step: of training, for errors. Over shared memory, ranks that are at different steps are an error.
        """

    @abstractmethod
    def exchange(self, weights_LP: Tensor, topology: Topology, step: int) -> Exchange:
        """Start to fetch the neighbours' weights of this step. ``weights_LP`` must not change until it is used."""

    def exchange_in_place(self, weights_LP: Tensor, topology: Topology, step: int) -> Exchange:
        """Like :meth:`exchange`, but neighbours may read the weights where they lie, without a copy.

        The average then writes to another buffer (``out``), in which the caller continues. One buffer of a shape and
        dtype may be exchanged in place at a time.
        """
        return self.exchange(weights_LP, topology, step)

    def mix_(self, weights_LP: Tensor, topology: Topology, step: int) -> None:
        """``w <- W w`` at once, for callers that compute nothing meanwhile. The same bits as an exchange."""
        self.exchange(weights_LP, topology, step).mixture().apply_(weights_LP)

    @abstractmethod
    def gather(self, values: Tensor) -> Tensor:
        """``[L, ...]`` of the held learners to ``[n, ...]`` of all, on every process."""
