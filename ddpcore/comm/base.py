"""What a strategy may ask of the learners' connection. Shapes: n learners in all, L of them held by this process."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ddpcore.dtypes import wide
from ddpcore.ops import Mixture
from ddpcore.topology import Round, Topology

Decode = Callable[[int, Tensor], Tensor]
"""What a neighbour (its number) sent ``[x]``, as its published weights ``[P]``."""


class Work(ABC):
    """A transfer under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the result is in place (on CUDA: when the current stream will see it)."""


class Done(Work):
    """A transfer that is over."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Exchange(ABC):
    """Neighbours' weights under way. They are used once, by one of the first four methods, or abandoned.

    ``mix_`` and ``mixture`` are for weights that were sent as they are and have not changed since. ``correct_`` and
    ``correction`` are for rows that were *published*: a copy of older weights, or what a codec made of them.
    """

    @abstractmethod
    def mix_(self) -> Tensor:
        """Wait, then ``w <- W w`` on the weights that were given.

        Returns:
            float64 ``[L, k]``: squared distance of each held learner, before mixing, to each of its k neighbours; of
            virtual learners (k = 1) to the mean of all learners.
        """

    @abstractmethod
    def mixture(self) -> Mixture | None:
        """Wait, then hand over what a one-pass optimizer needs; None at once where only ``mix_`` will do."""

    @abstractmethod
    def correct_(self, weights_LP: Tensor, published_LP: Tensor, factor: float, decode: Decode | None = None) -> None:
        """Wait, then ``w_j <- w_j + factor * sum_k W_jk (q_k - q_j)`` with the published rows q.

        Args:
            weights_LP: w of the learners held here.
            published_LP: their q, as every neighbour sees it.
            factor: how far to go.
            decode: what was exchanged as published rows; None where it is those rows themselves.
        """

    @abstractmethod
    def correction(self, published_LP: Tensor, factor: float, decode: Decode | None = None) -> Mixture | None:
        """Wait, then hand over what makes a one-pass optimizer do so; None at once where only ``correct_`` will do."""

    @abstractmethod
    def abandon(self) -> None:
        """Use nothing of it, and free its buffers, after a wait if they are written to. Every rank calls this alike."""


def correction(plan: Round, own: Tensor, peers: Sequence[Tensor], factor: float) -> Mixture:
    """``w + factor * sum_k W_k (q_k - own)`` as terms of one average, with q_k the ``peers``."""
    weights = [factor * weight for weight in plan.weights]
    return Mixture([*peers, own], 1.0, [*weights, -sum(weights)])


class Communicator(ABC):
    """Connects n learners. Every process calls the same methods in the same order.

    Attributes:
        num_learners: n.
        learners: the learners whose rows this process holds, ascending.
        bytes_sent: by one learner so far: its weights to each neighbour, and ``average_bytes`` for each average.
        description: what carries the bytes, for people.
    """

    num_learners: int
    learners: Sequence[int]
    bytes_sent: int = 0
    description: str

    def now(self) -> float:
        """Seconds on the clock by which training is timed. Every process calls this alike."""
        return time.perf_counter()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros, where the connection averages them best. Every process calls this alike."""
        return torch.zeros(shape, dtype=dtype, device=device)

    @abstractmethod
    def broadcast_(self, rows: Tensor) -> None:
        """Overwrite the rows ``[L, x]`` of every learner with those of learner 0."""

    @abstractmethod
    def average_(self, rows: Tensor, step: int | None = None) -> Work:
        """Start to overwrite the rows ``[L, x]`` with the mean over all n learners. They must not change meanwhile.

        Rows of 16 bits are added in fp32 and rounded once: so learners that are alike stay as they are.

        Args:
            rows: of the learners held here.
            step: of training, for errors; over shared memory ranks that are at different steps are one.
        """

    @abstractmethod
    def exchange(self, weights_LP: Tensor, topology: Topology, step: int) -> Exchange:
        """Start to fetch what ``topology`` says of this step. The weights must not change until it is used."""

    def lend(self, weights_LP: Tensor, topology: Topology, step: int) -> Exchange:
        """Like :meth:`exchange`, for an owner who can go on at another place: neighbours may read the weights in place.

        So the exchange is used by ``mixture()``, or by ``mix_()`` where there is none, and the new weights lie where
        the mixture says (``out``). One buffer of a shape and dtype may be lent at a time.
        """
        return self.exchange(weights_LP, topology, step)

    def mix_(self, weights_LP: Tensor, topology: Topology, step: int) -> None:
        """``w <- W w`` at once, for those who have nothing to do meanwhile. The same bits as ``exchange().mix_()``."""
        self.exchange(weights_LP, topology, step).mix_()

    @abstractmethod
    def gather(self, values: Tensor) -> Tensor:
        """``[L, ...]`` of the held learners to ``[n, ...]`` of all, on every process."""


def size_of(tensor: Tensor) -> str:
    """For errors: ``5000 float32``."""
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


def at(step: int | None) -> str:
    """For errors: `` at step 3``, or nothing."""
    return "" if step is None else f" at step {step}"


# gloo's all-reduce goes round its ring twice. While messages are so small that the rounds and not the bytes cost time,
# fetching everyone's rows goes round once; it adds in ascending order too, with the bits of virtual learners.
GATHER_BYTES = 2**20  # received by one learner


def is_small(row: Tensor, num_learners: int) -> bool:
    """Whether gloo ranks gather a row of this size to average it."""
    return row.nbytes * (num_learners - 1) <= GATHER_BYTES


def average_bytes(row: Tensor, num_learners: int) -> int:
    """Bytes that one of n learners sends to average a row: n-1 times a small one, 2(n-1)/n of a large one's sum."""
    if is_small(row, num_learners):
        return row.nbytes * (num_learners - 1)
    return sum_bytes(row, num_learners)


def sum_bytes(row: Tensor, num_learners: int) -> int:
    """Bytes that each of n learners sends in an all-reduce of a row, which carries the wider dtype."""
    return all_reduce_bytes(row.numel() * wide(row.dtype).itemsize, num_learners)


def all_reduce_bytes(num_bytes: int, num_learners: int) -> int:
    """Bytes that each of n learners sends in a bandwidth-optimal all-reduce of ``num_bytes``: 2(n-1)/n of them."""
    return 2 * (num_learners - 1) * num_bytes // num_learners
