"""Learners whose ranks reach each other's memory: they read neighbours' weights and add gradients where these lie.

Shapes: n learners, P elements of a learner's row. Every rank holds one learner (L = 1).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Communicator, Done, Exchange, PeerExchange, Work
from ddpcore.comm.errors import at, size_of
from ddpcore.comm.reductions import average_half_, average_share_
from ddpcore.comm.shared.coordination import NUM_TEXTS, Coordinator
from ddpcore.comm.shared.memory import Memory
from ddpcore.comm.traffic import all_reduce_bytes
from ddpcore.ops import Mixture, WeightAverage
from ddpcore.topology.base import Topology
from ddpcore.topology.rounds import Round

STAGING_BYTES = 4 * 2**20  # of each rank, through which go tensors that no other rank can reach, in pieces


@dataclass
class _Shared:
    """A buffer that every rank has allocated: where this rank's lies, and those of all (None for its own)."""

    start: int
    num_bytes: int
    views: list[Tensor | None]


@dataclass
class _Snapshot:
    """Room for rows that neighbours read: of each rank one. ``used`` is the operation before which reading ended."""

    views: list[Tensor]
    readers: Sequence[int] = ()
    is_handed_out: bool = False
    used: int | None = None  # None: under way


_Kind = tuple[int, torch.dtype, torch.device]


def _kind_of(weights: Tensor) -> _Kind:
    return weights.numel(), weights.dtype, weights.device


class SegmentCommunicator(Communicator):
    """Learner j is rank j of the group, and reads the others' memory.

    An exchange copies the rows into a snapshot, and neighbours mix from it where it lies. Two take turns, more where
    several exchanges are under way. A rank overwrites one that it has itself done with reading from, once the readers
    have come to a later operation: they call the same in the same order, so they have done with it too.

    Weights that are lent are not copied: they live in a snapshot, and the step that mixes them writes the new ones into
    the next. On CUDA they are copied all the same, since captured graphs know weights by their address.

    An average of columns that lie in memory from :meth:`allocate` waits until all ranks came to it; then each rank
    forms the mean of one share of the columns, adding in ascending order, writes it into everyone's row, and waits
    until all have. Other tensors go through a staging area.

    Args:
        group: the process group, for setting up.
        memory: how ranks reach each other's buffers.
        timeout: seconds that a rank which lives may let the others wait; one that is gone is noticed at once.
        description: see :class:`Communicator`.
    """

    def __init__(self, group: dist.ProcessGroup, memory: Memory, timeout: float, description: str) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}: it must be above 0 seconds")
        self._coordinator = Coordinator(group, timeout)
        self._memory = memory
        self.rank, self.num_learners = self._coordinator.rank, self._coordinator.num_ranks
        self.learners = (self.rank,)
        self.description = description
        self._shared: dict[int, _Shared] = {}
        self._num_shared = 0
        self._pending: deque[_Average] = deque()
        own, views = self._allocate(STAGING_BYTES)
        self._staging: list[Tensor] = [own if view is None else view for view in views]
        self._snapshots: dict[_Kind, list[_Snapshot]] = {}
        self._next: dict[_Kind, _Snapshot] = {}  # where weights that are lent live, until they are lent again

    @override
    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        own, views = self._allocate(num_bytes)
        number = self._num_shared
        self._num_shared += 1
        self._shared[number] = _Shared(own.data_ptr(), num_bytes, views)
        # The others' memory is held exactly as long as one's own, so that a layout that was given up is freed.
        weakref.finalize(own.untyped_storage(), self._shared.pop, number, None).atexit = False
        return own[:num_bytes].view(dtype).view(shape)

    @override
    def broadcast_(self, rows: Tensor) -> None:
        for piece, staged in self._staged("broadcast", rows):
            if self.rank != 0:
                piece.copy_(staged[0])

    @override
    def average_(self, rows: Tensor, step: int | None = None) -> Work:
        """Learners are added in ascending order. Of shared memory nothing waits here."""
        if self.num_learners == 1:
            return Done()
        self.bytes_sent += all_reduce_bytes(rows.numel() * rows.element_size(), self.num_learners)
        found = self._find(rows)
        if found is None:
            for _, staged in self._staged(f"average{at(step)}", rows, comes_back=True):
                average_share_([area.view(rows.dtype) for area in staged], self.rank)
            return Done()
        if len(self._pending) >= NUM_TEXTS // 2:  # the others must still be able to read what they came to
            self.complete(self._pending[0].number)
        where, columns = found
        self._memory.publish()
        number = self._coordinator.arrive(f"an average of {size_of(rows)}{at(step)} {where}")
        work = _Average(self, number, columns)
        self._pending.append(work)
        return work

    @override
    def exchange(self, weights_LP: Tensor, topology: Topology, step: int) -> Exchange:
        weights, plan = weights_LP[0], topology.round(step, self.rank, self.num_learners)
        if self.num_learners == 1:
            return _SnapshotExchange(self, -1, weights, plan, _Snapshot([weights]))
        self._note_used()
        snapshot = self._free_snapshot(weights)
        return _SnapshotExchange(self, self._publish(weights, plan, snapshot, step), weights, plan, snapshot)

    @override
    def exchange_in_place(self, weights_LP: Tensor, topology: Topology, step: int) -> Exchange:
        weights, plan = weights_LP[0], topology.round(step, self.rank, self.num_learners)
        if self.num_learners == 1 or weights.is_cuda:
            return self.exchange(weights_LP, topology, step)
        self._note_used()
        snapshot = self._next.pop(_kind_of(weights), None) or self._free_snapshot(weights)
        return _InPlaceExchange(self, self._publish(weights, plan, snapshot, step), weights, plan, snapshot)

    @override
    def mix_(self, weights_LP: Tensor, topology: Topology, step: int) -> None:
        """Two that take the mean of both form half of it each, where both weights lie."""
        found = self._find(weights_LP)
        rounds = topology.rounds(step, self.num_learners)
        if found is None or not all(map(_has_at_most_a_partner, rounds)):  # on all ranks alike
            super().mix_(weights_LP, topology, step)
            return
        self._complete_all()
        where, columns = found
        self._memory.publish()
        number = self._coordinator.arrive(f"the average in pairs of {size_of(weights_LP)} at step {step} {where}")
        partners = rounds[self.rank].sources
        for partner in partners:
            self.arrived([partner], number)
            average_half_(columns[self.rank], columns[partner], lower=self.rank < partner)
            self.bytes_sent += weights_LP.numel() * weights_LP.element_size()
        self._memory.publish()
        self._coordinator.finish(number)
        self._finished(number, partners)

    @override
    def gather(self, values: Tensor) -> Tensor:
        values = values.contiguous()
        result = values.new_empty((self.num_learners, *values.shape[1:]))
        columns = result.view(-1).view(torch.uint8).view(self.num_learners, -1)
        begin = 0
        for piece, staged in self._staged("gather", values):
            for row, other in zip(columns, staged, strict=True):
                row[begin : begin + len(piece)].copy_(other)
            begin += len(piece)
        return result

    # --- for the works ---------------------------------------------------------------------------------------------

    def complete(self, number: int) -> None:
        """Finish the averages that were started, up to an operation, and what others need of later ones already."""
        meeting = self._coordinator
        while self._pending and (self._pending[0].number <= number or meeting.have_arrived(self._pending[0].number)):
            work = self._pending[0]
            self.arrived(range(self.num_learners), work.number)
            average_share_(work.columns, self.rank)
            self._memory.publish()
            meeting.finish(work.number)
            self._pending.popleft()
        self._finished(number)

    def arrived(self, ranks: Sequence[int], number: int) -> None:
        """Return when what these ranks gave to an operation can be read."""
        self._coordinator.await_arrived(ranks, number)
        for rank in ranks:
            self._memory.follow(rank)

    def next_place(self, weights: Tensor) -> Tensor:
        """Where weights that are lent live on, and where the next time finds them."""
        snapshot = self._next[_kind_of(weights)] = self._free_snapshot(weights)
        return snapshot.views[self.rank]

    def take_back(self, weights: Tensor, snapshot: _Snapshot) -> None:
        """Weights that were lent for nothing are where they were."""
        self._next[_kind_of(weights)] = snapshot

    # --- parts -----------------------------------------------------------------------------------------------------

    def _publish(self, weights: Tensor, plan: Round, snapshot: _Snapshot, step: int) -> int:
        own = snapshot.views[self.rank]
        if plan.destinations and own.data_ptr() != weights.data_ptr():
            own.copy_(weights)
        self._memory.publish()
        number = self._coordinator.arrive(f"the exchange of {size_of(weights)} at step {step}")
        snapshot.readers = plan.destinations
        self.bytes_sent += len(plan.destinations) * weights.numel() * weights.element_size()
        return number

    def _complete_all(self) -> None:
        if self._pending:
            self.complete(self._pending[-1].number)

    def _finished(self, number: int, ranks: Sequence[int] | None = None) -> None:
        ranks = self._coordinator.others if ranks is None else ranks
        self._coordinator.await_finished(number, ranks)
        for rank in ranks:
            self._memory.follow(rank)

    def _allocate(self, num_bytes: int) -> tuple[Tensor, list[Tensor | None]]:
        """A buffer of this rank, zeros, and those of all others. Collective."""
        self._complete_all()  # to be through with this is to be through with all before
        num_bytes = max(num_bytes, 1)  # what is empty cannot be mapped
        own, handle = self._memory.allocate(num_bytes)
        number = self._coordinator.arrive(f"the allocation of {num_bytes} bytes", handle)
        self._coordinator.await_arrived(range(self.num_learners), number)
        views: list[Tensor | None] = [None] * self.num_learners
        for rank in self._coordinator.others:
            handle = self._coordinator.handle_of(rank)
            try:
                views[rank] = self._memory.open(self._coordinator.pids[rank], handle, num_bytes)
            except (OSError, ValueError) as error:  # it came, and died before it was read
                self._coordinator.lose(rank, number, error)
        self._coordinator.finish(number)
        self._coordinator.await_finished(number)
        return own, views

    def _note_used(self) -> None:
        for snapshots in self._snapshots.values():
            for one in snapshots:
                if one.is_handed_out:  # and used by now: a mixture is used before the next exchange starts
                    one.is_handed_out, one.used = False, self._coordinator.num_operations

    def _free_snapshot(self, like: Tensor) -> _Snapshot:
        """One that nobody reads any more, now under way; a new one, made by all ranks alike, where there is none."""
        now = self._coordinator.num_operations
        known = self._snapshots.setdefault(_kind_of(like), [])
        # What was read until this very operation is not free: its readers would wait for us, and we for them.
        free = [one for one in known if one.used is not None and one.used < now]
        if free:
            snapshot = min(free, key=lambda one: one.used or 0)
            self._coordinator.await_passed(snapshot.readers, snapshot.used or 0)
            for reader in snapshot.readers:
                self._memory.follow(reader)
        else:
            new = [self._new_snapshot(like) for _ in range(1 if known else 2)]
            known += new
            snapshot = new[0]
        snapshot.used = None
        return snapshot

    def _new_snapshot(self, like: Tensor) -> _Snapshot:
        """In a storage of its own: whoever saves a parameter saves all that its storage holds."""
        own, views = self._allocate(like.numel() * like.element_size())
        return _Snapshot([(own if view is None else view)[: like.nbytes].view(like.dtype) for view in views], used=-1)

    def _find(self, rows: Tensor) -> tuple[str, list[Tensor]] | None:
        """Where in a shared buffer a row lies, and the same columns of all ranks; None where in none."""
        first, num_bytes = rows.data_ptr(), rows.numel() * rows.element_size()
        for number, shared in self._shared.items():
            start = first - shared.start
            if start >= 0 and start + num_bytes <= shared.num_bytes and num_bytes > 0:
                columns = [
                    rows[0] if view is None else view[start : start + num_bytes].view(rows.dtype)
                    for view in shared.views
                ]
                return f"at byte {start} of buffer {number}", columns
        return None

    def _staged(self, what: str, rows: Tensor, *, comes_back: bool = False) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Piece by piece, as bytes: one's own, and the same of every rank in the staging area. Collective.

        Where it ``comes_back``, one's own becomes what all together made of it there.
        """
        self._complete_all()
        own = rows.view(-1).view(torch.uint8)
        for piece in own.split(STAGING_BYTES) if len(own) else ():
            staged = [area[: len(piece)] for area in self._staging]
            staged[self.rank].copy_(piece)
            self._memory.publish()
            number = self._coordinator.arrive(f"a piece of {len(piece)} bytes of the {what} of {size_of(rows)}")
            self.arrived(range(self.num_learners), number)
            yield piece, staged
            self._memory.publish()
            self._coordinator.finish(number)
            self._finished(number)
            if comes_back:
                piece.copy_(staged[self.rank])


class _Average(Work):
    def __init__(self, comm: SegmentCommunicator, number: int, columns: list[Tensor]) -> None:
        self._comm, self.number, self.columns = comm, number, columns

    def wait(self) -> None:
        self._comm.complete(self.number)


class _SnapshotExchange(PeerExchange):
    def __init__(
        self, comm: SegmentCommunicator, number: int, weights: Tensor, round_: Round, snapshot: _Snapshot
    ) -> None:
        super().__init__(comm.learners, lambda _: round_)
        self._comm, self._number, self._weights, self._round, self._snapshot = comm, number, weights, round_, snapshot

    @override
    def received(self) -> Mapping[int, Tensor]:
        self._comm.arrived(self._round.sources, self._number)
        self._snapshot.is_handed_out = True
        return {source: self._snapshot.views[source] for source in self._round.sources}

    @override
    def abandon(self) -> None:
        self._snapshot.is_handed_out = True


class _InPlaceExchange(_SnapshotExchange):
    @override
    def mixture(self) -> WeightAverage:
        mixture = super().mixture()
        assert isinstance(mixture, Mixture)
        return replace(mixture, out=self._comm.next_place(self._weights))

    @override
    def abandon(self) -> None:
        self._comm.take_back(self._weights, self._snapshot)


def _has_at_most_a_partner(plan: Round) -> bool:
    """Idle, or half and half with one who does the same."""
    half = plan.self_weight == 0.5 and plan.weights == (0.5,) and plan.sources == plan.destinations
    return half or (not plan.sources and not plan.destinations)
