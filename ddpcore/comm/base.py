"""The interface of a connection between learners, weights that learners average in pairs without waiting, and columns.

Shapes: n learners in all, L of them held by this process, P elements of a learner's weights, x any number of columns. A
row of live weights is ``[K, P]``: the weights, and K - 1 further copies that a rule moves with them.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.groups import Fact, check_has_average
from ddpcore.comm.membership import Change, Membership
from ddpcore.comm.reductions import average_bytes, average_pair_, chunk_of
from ddpcore.ops import Mixture, RowMixtures, WeightAverage, average_
from ddpcore.topology.base import Topology
from ddpcore.topology.rounds import Round
from ddpcore.topology.wrapped import WithinGroups


class Job(NamedTuple):
    """What a learner has done since it read its weights."""

    read: Tensor  # the weights that it read, ``[P]``
    model: Tensor  # the weights of its model, ``[P]``: ``read`` plus the step of the optimizer

    def begin_next_(self, weights: Tensor) -> None:
        """Overwrite this job with the next one, which reads these weights."""
        self.model.copy_(weights)
        self.read.copy_(weights)


class PairMean:
    """What a meeting of two learners does to their rows: both take the mean. A strategy may move further copies."""

    num_copies = 1  # K

    def first_rows(self, weights_LP: Tensor) -> Tensor:
        """New rows ``[L, K, P]``, each copy equal to the weights."""
        return weights_LP[:, None].repeat(1, self.num_copies, 1)

    def drift_(self, row: Tensor, time: float) -> None:
        """Move a row ``[K, P]`` for ``time`` without a meeting."""

    def move_doubles_(self, own: Tensor, peer: Tensor, step: Tensor) -> None:
        """Move the further copies in a meeting, before the weights take their mean; add ``step`` to the own ones."""

    @torch.no_grad()
    def meet_(self, own: Tensor, peer: Tensor | None, job: Job) -> None:
        """Average this learner's row and one that is here, add the step of the job, and begin the next job.

        Without a peer nothing is averaged.
        """
        size = chunk_of(job.model)
        for begin in range(0, len(job.model), size):
            end = begin + size
            piece, mine = Job(job.read[begin:end], job.model[begin:end]), own[:, begin:end]
            step = piece.model - piece.read
            if peer is None:
                mine.add_(step)
            else:
                theirs = peer[:, begin:end]
                self.move_doubles_(mine, theirs, step)
                average_pair_(theirs[0], mine[0])
                torch.add(theirs[0], step, out=mine[0])
            piece.begin_next_(mine[0])

    @torch.no_grad()
    def apply_mean_(self, own: Tensor, mean: Tensor) -> None:
        """One side of a meeting, from the mean ``[P]`` of both weights."""
        own[0].copy_(mean)


class LiveWeights(ABC):
    """The weights w_i of all learners, beside their models."""

    @abstractmethod
    def meet(self, learner: int, peer: int, job: Job) -> None:
        """``w_i, w_j <- (w_i + w_j) / 2``; ``w_i <- w_i + step of the job``: atomic. The next job begins at w_i.

        Further copies move as the rule says. Learner i is held here; if it is its own peer j, nothing is averaged.
        """

    @abstractmethod
    def drift(self, learner: int, time: float) -> None:
        """Move the row of a learner held here as its rule says for ``time`` without a meeting: atomic."""

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


class LocalLiveWeights(LiveWeights):
    """The weights of all learners, where one process holds all of them."""

    def __init__(self, weights_LP: Tensor, rule: PairMean) -> None:
        self._rows_LKP, self._rule = rule.first_rows(weights_LP), rule

    @override
    @torch.no_grad()
    def meet(self, learner: int, peer: int, job: Job) -> None:
        rows = self._rows_LKP
        self._rule.meet_(rows[learner], None if peer == learner else rows[peer], job)

    @override
    def drift(self, learner: int, time: float) -> None:
        self._rule.drift_(self._rows_LKP[learner], time)

    @override
    def rows(self) -> Tensor:
        return self._rows_LKP.clone()

    @override
    def settle(self) -> None:
        return

    @override
    def load(self, rows_LKP: Tensor) -> None:
        self._rows_LKP.copy_(rows_LKP)


Decode = Callable[[int, Tensor], Tensor]
"""``decode(learner, row)`` turns the row ``[x]`` that a neighbour sent into its published weights ``[P]``."""


class Work:
    """A transfer in progress, which ``end`` completes; without it, one that is complete."""

    def __init__(self, end: Callable[[], None] = lambda: None) -> None:
        self._end = end

    def wait(self) -> None:
        """Return when the result is in place. On CUDA: when later work of the current stream will read the result."""
        self._end()


class Exchange(ABC):
    """A transfer of neighbours' weights in progress. It holds the rows of other processes by their learners.

    End it by one call of ``mixture``, ``correction``, ``differences``, ``rows`` or ``abandon``.

    ``round_of`` returns the round of a learner held here in this step: whom it averages with, and the weights.
    """

    def __init__(self, learners: Sequence[int], round_of: Callable[[int], Round]) -> None:
        self.learners, self.round_of = learners, round_of

    def quarantine(self, learners: Set[int]) -> None:
        """Let some learners of this process take the average of their neighbours, without their own weights."""
        given = self.round_of
        self.round_of = lambda learner: given(learner).without_self() if learner in learners else given(learner)

    @abstractmethod
    def received(self) -> Mapping[int, Tensor]:
        """Wait, then return the rows of other processes by learner."""

    def mixture(self) -> WeightAverage:
        """Wait, then return ``w <- W w``. The rows sent were the weights, which have not changed since then."""
        rows, round_ = self.received(), self.round_of(self.learners[0])
        peers = [rows[source] for source in round_.sources]
        return Mixture(peers, round_.self_weight, round_.weights, out=self.new_row())

    def new_row(self) -> Tensor | None:
        """Where the mixture of weights that are exchanged in place goes; None: into the row of the weights itself."""
        return None

    def correction(self, published_LP: Tensor, factor: float, decode: Decode | None = None) -> WeightAverage:
        """Wait, then return ``w_j <- w_j + factor * sum_k W_jk (q_k - q_j)``, with published rows q.

        Published rows are older weights, or the weights as a codec decodes them. ``published_LP`` are the rows
        of learners held here, and ``decode`` turns received rows into published rows; None if both are equal.
        """
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

    def differences(self, sent_LP: Tensor) -> Tensor:
        """Wait, then return ``sum_k W_jk (x_k - x_j)`` for the rows x, of which ``sent_LP`` are those held here.

        Each difference is rounded alone, so two neighbours' differences are equal with opposite signs, bit for bit.
        Where W is symmetric, the sum over learners has an error in proportion to the differences, not to the rows.
        """
        rows = self.rows(sent_LP)
        sums_LP = torch.zeros_like(sent_LP)
        for learner, total in zip(self.learners, sums_LP, strict=True):
            round_ = self.round_of(learner)
            for source, weight in zip(round_.sources, round_.weights, strict=True):
                total += (rows[source] - rows[learner]).mul_(weight)
        return sums_LP

    def rows(self, sent_LX: Tensor) -> Mapping[int, Tensor]:
        """Wait, then return the rows of the learners held here, ``sent_LX``, and of their neighbours, by learner."""
        return {**self.received(), **dict(zip(self.learners, sent_LX, strict=True))}

    def abandon(self) -> None:
        """Free the buffers without using them, after a wait if they are still written to. Collective."""
        self.received()


class Communicator(ABC):
    """Connects n learners. All methods are collective: every process calls the same methods in the same order.

    Attributes:
        num_learners: n.
        learners: the learners whose rows this process holds, ascending: their places among ``members``.
        bytes_sent: bytes that one learner has sent: its weights to each neighbour, and its part of each average.
        transport: ``virtual``, ``shm``, ``ipc``, ``pg``, ``mixed``, ``grid`` (virtual on ranks), ``link`` (emulated).
        description: the transport, as text for people.
        membership: which learners take part, if they may die or join; else None.
    """

    num_learners: int
    learners: Sequence[int]
    membership: Membership | None = None
    transport: str = "pg"
    bytes_sent: int = 0
    description: str

    @property
    def members(self) -> Sequence[int]:
        """The ids of all learners, in the order in which :meth:`gather` returns their values."""
        return range(self.num_learners) if self.membership is None else self.membership.members

    @property
    def ids(self) -> Sequence[int]:
        """The ids of the learners held here, by row. They stay when others die; ``learners`` are places among those."""
        return self.learners if self.member is None else (self.member,)

    @property
    def member(self) -> int | None:
        """The id of this rank, if ranks may die or join; else None."""
        return None

    @property
    def waited(self) -> Mapping[int, float]:
        """Seconds that this process has waited for each other rank so far; empty if the transport cannot tell."""
        return {}

    def redrawn(self, topology: Topology) -> Topology:
        """The topology over the learners that are left: it changes only if learners may die or join."""
        return topology if self.membership is None else self.membership.topology(topology, len(self.membership.members))

    def admit(self, step: int) -> int | None:
        """At the end of a step: let a learner in that joins, and return its id. Collective."""
        return None

    def hand_over(self, new: int, make: Callable[[], Tensor]) -> Tensor | None:
        """Send the result of ``make``, bytes, from a neighbour of a new member to it. Collective; others get None."""
        raise NotImplementedError(f"{self.description}: no rank joins")

    def announce(self, facts: Sequence[Fact], first: int) -> None:
        """From now on let ranks join that train the same, if ranks may join. The run began with ``first`` learners."""

    def note_topology(self, topology: Topology) -> None:
        """Say in the description which edges of a topology go which way, if there are several ways."""

    def reads(self, row: int) -> bool:
        """Whether the next operation reads this row of those held here, whose learner may be gone."""
        return True

    @property
    def rows_read(self) -> list[int]:
        """The rows held here that the next operation reads. The first of them stands for all where one does."""
        return list(filter(self.reads, range(len(self.learners))))

    def play(self, script: Iterable[Change]) -> None:
        """See :meth:`ddpcore.Distributed.play`."""
        raise ValueError("only virtual learners with on_failure='shrink' die by a script: see docs/reliability.md")

    def settle(self) -> None:
        """Apply the changes of a script that are due, before an operation does."""

    def now(self) -> float:
        """Seconds on the clock that times training."""
        return time.perf_counter()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros, in memory that the connection averages without a copy."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def live(self, weights_LP: Tensor, rule: PairMean | None = None) -> LiveWeights:
        """Weights that learners average in pairs without waiting; those held here begin as these. Collective.

        ``rule`` is what a meeting does to two rows; None: both take their mean. ValueError: the connection cannot.
        """
        if len(self.learners) < self.num_learners:
            raise ValueError(f"{self.description}: no learner reads the weights of another without waiting")
        return LocalLiveWeights(weights_LP, rule or PairMean())

    @abstractmethod
    def broadcast_(self, rows: Tensor) -> None:
        """Overwrite the rows ``[L, x]`` of every learner with learner 0's row."""

    @abstractmethod
    def average_(self, rows: Tensor, step: int | None = None, size: int | None = None) -> Work:
        """Start to overwrite the rows ``[L, x]`` with the mean over all n learners, or over the learners of a group.

        Rows of 16 bits are added in fp32 and rounded once, so equal learners stay equal.

        Args:
            rows: of the learners held here. They must not change before the work ends. ValueError, before anything is
                sent: their dtype has no average, because it is an integer, bool, or has 8 bits.
            step: of training, for error messages. Shared memory raises an error if ranks are at different steps.
            size: of each group, for which :meth:`form_groups` was called: learners 0 to size-1, size to 2 size-1, and
                so on. A group waits for no learner of another one. None: all learners.
        """

    def form_groups(self, size: int) -> None:
        """Prepare averages in groups of a size that divides n. Collective. ValueError: the connection has no groups."""
        raise ValueError(f"{self.description}: learners cannot average in groups of {size}: leave group out")

    def average_pieces_(
        self, columns: Tensor, pieces: Iterable[tuple[int, Sequence[Tensor]]], size: int
    ) -> dict[int, Tensor]:
        """Average columns of virtual learners that lie in pieces. Returns the rows' sums before, by first column."""
        self.bytes_sent += average_bytes(columns[0], size)
        return {begin: average_(rows, size) for begin, rows in pieces}

    @abstractmethod
    def exchange(self, weights_LP: Tensor, topology: Topology, step: int, *, in_place: bool = False) -> Exchange:
        """Start to fetch the neighbours' weights of a step. ``weights_LP`` must not change until the result is used.

        With ``in_place`` neighbours may read ``weights_LP`` itself, without a copy. The average then writes to another
        buffer (``out``), which holds the weights from then on. Only one of a shape and dtype may be exchanged so.
        """

    def mix_(self, weights_LP: Tensor, topology: Topology, step: int) -> None:
        """Apply ``w <- W w`` and wait, without overlap with other work. The result has the bits of an exchange."""
        check_has_average(weights_LP)
        self.exchange(weights_LP, topology, step).mixture().apply_(weights_LP)

    @abstractmethod
    def gather(self, values: Tensor, step: int | None = None) -> Tensor:
        """Return the values ``[L, ...]`` of all processes as ``[n, ...]``, by learner. ``step``: None outside steps."""


def exchange_columns(comm: Communicator, rows_LX: Tensor, topology: Topology, size: int, step: int) -> Exchange:
    """Like ``comm.exchange``, where the learners of each group hold the same rows.

    The learner at place i of its group sends the i-th of ``size`` parts of the columns to the learners at this place of
    other groups. Members then gather what each has averaged, so they hold the same bits. Size 1 is ``comm.exchange``.
    """
    return comm.exchange(rows_LX, topology, step) if size == 1 else _ColumnExchange(comm, rows_LX, topology, size, step)


class _ColumnExchange(Exchange):
    """Parts have equal lengths, so the last one may overlap with the one before it: there both have the same bits."""

    def __init__(self, comm: Communicator, rows_LX: Tensor, topology: Topology, size: int, step: int) -> None:
        super().__init__(comm.learners, lambda learner: topology.round(step, learner, comm.num_learners))
        self._comm, self._size, self._step = comm, size, step
        num = rows_LX.shape[1]
        self._length = -(-num // size)
        self._begins = [min(place * self._length, num - self._length) for place in range(size)]
        begins = [self._begins[learner % size] for learner in comm.learners]
        parts = [row[begin : begin + self._length] for row, begin in zip(rows_LX, begins, strict=True)]
        self._parts_LY = torch.stack(parts)
        self._between = comm.exchange(self._parts_LY, topology, step)

    @override
    def received(self) -> Mapping[int, Tensor]:
        return self._between.received()  # parts of rows

    @override
    def mixture(self) -> WeightAverage:
        self._between.mixture().apply_(self._parts_LY)
        parts = self._comm.exchange(self._parts_LY, WithinGroups(self._size), self._step).rows(self._parts_LY)
        firsts = [learner - learner % self._size for learner in self.learners]
        return _Gathered([[(begin, parts[a + i]) for i, begin in enumerate(self._begins)] for a in firsts])


@dataclass(frozen=True)
class _Gathered(WeightAverage):
    """The averaged columns of each row, after their first column."""

    parts: list[list[tuple[int, Tensor]]]

    @override
    def apply_(self, weights_LP: Tensor) -> None:
        for row, parts in zip(weights_LP, self.parts, strict=True):
            for begin, part in parts:
                row[begin : begin + len(part)] = part
