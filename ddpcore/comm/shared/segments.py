"""Learners on ranks that share memory: they read neighbours' weights and average gradients in place.

Shapes: n learners, P elements of a learner's row. Every rank holds one learner (L = 1)."""

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Communicator, Exchange, LiveWeights, PairMean, Work
from ddpcore.comm.groups import at, check_has_average, default_group, size_of
from ddpcore.comm.reductions import all_reduce_bytes, average_half_, average_share_
from ddpcore.comm.shared.coordination import NUM_TEXTS, Coordinator
from ddpcore.comm.shared.live import SharedLiveWeights
from ddpcore.comm.shared.memory import Buffers, HostMemory, Memory, Slot, Slots
from ddpcore.runtime import launch
from ddpcore.topology.base import Topology
from ddpcore.topology.rounds import Round

STAGING_BYTES = 4 * 2**20  # a shared area of each rank: tensors in private memory are copied through it in pieces


_Kind = tuple[int, torch.dtype, torch.device]


class SegmentCommunicator(Communicator):
    """Learner j is rank j of the group. Ranks read and write each other's memory.

    An exchange copies the row into a snapshot, and neighbours average from that memory. Snapshots are double-buffered,
    with more buffers if several exchanges are in progress. A rank overwrites a snapshot when it has read the others'
    rows of it and all readers of its own row have begun a later operation. All ranks call the same operations in the
    same order, so the readers have finished too.

    Weights that are exchanged in place are not copied: they lie in a snapshot, and the step that averages them writes
    the new weights into the next snapshot. On CUDA they are copied, because captured graphs hold addresses of weights.

    An average of columns in memory from :meth:`allocate` waits until all ranks have begun it. Then each rank averages
    one share of the columns, added in ascending order, writes it into the rows of all ranks, and waits for the others.
    Other tensors are copied through a staging area. Ranks that average in a group count these operations by themselves.

    Args:
        group: a process group, used only for setting up; None is the default group.
        timeout: seconds that a living rank may let the others wait. A rank that died is noticed within a second.
        transport: the first words of ``description``.
        among: the ranks of the group that this rank reaches, ascending, which reach each other; None: all. Broadcasts,
            averages and gatherings are of these ranks, and a topology must have no other edges.
        in_thread: whether a thread of each rank computes averages that have begun.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        memory: Memory,
        timeout: float,
        transport: str,
        among: Sequence[int] | None = None,
        *,
        in_thread: bool = False,
    ) -> None:
        group = default_group(group)
        launch.check_timeout(timeout)
        self._group, self._timeout = group, timeout
        self._coordinator = Coordinator(group, timeout, among=among)
        self._memory = memory
        self.rank, self.num_learners = self._coordinator.rank, dist.get_world_size(group)
        self.learners = (self.rank,)
        self.ranks = range(self.num_learners) if among is None else among
        self.description = f"{transport}, {len(self.ranks)} ranks" + ", averages in a thread of each" * in_thread
        self._shared = Buffers(self.rank)
        self._in_thread = in_thread
        self._averages = Averages(self._coordinator, memory, self.ranks, in_thread=in_thread)
        self._groups: dict[int, Averages] = {}  # in the group of this rank, by its size
        self._staging = self._allocate(STAGING_BYTES)
        self._snapshots = Slots()
        self._next: dict[_Kind, Slot] = {}  # where weights lie between two exchanges in place

    @property
    @override
    def waited(self) -> Mapping[int, float]:
        total = dict(self._coordinator.waited)
        for averages in self._groups.values():
            for rank, seconds in averages.coordinator.waited.items():
                total[rank] += seconds
        return total

    @override
    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        buffers = self._allocate(num_bytes)
        own = buffers[self.rank]
        self._shared.add(own, buffers)  # the others' are unmapped when this rank's is freed
        return own[:num_bytes].view(dtype).view(shape)

    @override
    def broadcast_(self, rows: Tensor) -> None:
        for piece, staged in self._staged("broadcast", rows):
            if self.rank != self.ranks[0]:
                piece.copy_(staged[self.ranks[0]])

    @override
    def form_groups(self, size: int) -> None:
        first = self.rank // size * size
        ranks = range(first, first + size)
        coordinator = Coordinator(self._group, self._timeout, among=ranks)
        self._groups[size] = Averages(coordinator, self._memory, ranks, in_thread=self._in_thread)

    @override
    def average_(self, rows: Tensor, step: int | None = None, size: int | None = None) -> Work:
        """Learners are added in ascending order. ``wait`` or a thread computes an average in shared memory."""
        check_has_average(rows)
        averages = self._averages if size is None else self._groups[size]
        if len(averages.ranks) == 1:
            return Work()
        self.bytes_sent += all_reduce_bytes(rows.nbytes, len(averages.ranks))
        if (found := self._shared.find(rows)) is None:
            for _, staged in self._staged(f"average{at(step)}", rows, averages, comes_back=True):
                averages.share_([staged[rank].view(rows.dtype) for rank in averages.ranks])
            return Work()
        where, columns = found
        text = f"an average of {size_of(rows)}{at(step)} {where}"
        return averages.begin(text, [columns[rank] for rank in averages.ranks])

    @override
    def exchange(self, weights_LP: Tensor, topology: Topology, step: int, *, in_place: bool = False) -> Exchange:
        weights, round_ = weights_LP[0], topology.round(step, self.rank, self.num_learners)
        in_place = in_place and not weights.is_cuda
        kind = weights.numel(), weights.dtype, weights.device
        self._snapshots.note_used(self._coordinator.num_operations)
        if len(self.ranks) == 1:
            return _SnapshotExchange(self, -1, round_, Slot({self.rank: weights}))
        snapshot = (self._next.pop(kind, None) if in_place else None) or self._free_snapshot(kind)
        own = snapshot.views[self.rank]
        if round_.destinations and own.data_ptr() != weights.data_ptr():
            own.copy_(weights)
        self._memory.publish()
        number = self._coordinator.arrive(f"the exchange of {size_of(weights)} at step {step}")
        snapshot.readers = round_.destinations
        self.bytes_sent += len(round_.destinations) * weights.nbytes
        return _SnapshotExchange(self, number, round_, snapshot, kind if in_place else None)

    @override
    def mix_(self, weights_LP: Tensor, topology: Topology, step: int) -> None:
        """If all learners average in pairs, each of the two writes one half of the mean into both rows."""
        check_has_average(weights_LP)
        found = self._shared.find(weights_LP)
        rounds = topology.rounds(step, self.num_learners)
        if found is None or not all(map(_is_pair_or_idle, rounds)):  # the same on all ranks
            super().mix_(weights_LP, topology, step)
            return
        self._averages.complete_all()
        where, columns = found
        self._memory.publish()
        number = self._coordinator.arrive(f"the average in pairs of {size_of(weights_LP)} at step {step} {where}")
        partners = rounds[self.rank].sources
        for partner in partners:
            self._coordinator.await_arrived([partner], number)
            average_half_(columns[self.rank], columns[partner], lower=self.rank < partner)
            self.bytes_sent += weights_LP.nbytes
        self._memory.publish()
        self._coordinator.finish(number)
        self._coordinator.await_finished(number, partners)

    @override
    def gather(self, values: Tensor, step: int | None = None) -> Tensor:
        values = values.contiguous()
        result = values.new_empty((len(self.ranks), *values.shape[1:]))
        columns = result.view(-1).view(torch.uint8).view(len(self.ranks), -1)
        begin = 0
        for piece, staged in self._staged("gather", values):
            for row, other in zip(columns, staged.values(), strict=True):
                row[begin : begin + len(piece)].copy_(other)
            begin += len(piece)
        return result

    def fail(self, why: str) -> NoReturn:
        """Raise RuntimeError here, and on every other rank when it waits next."""
        self._coordinator.fail(why)

    def _allocate(self, num_bytes: int) -> dict[int, Tensor]:
        """Allocate a buffer of zeros on each rank, and return the buffers by rank, ascending. Collective."""
        self._averages.complete_all()  # because finishing this operation declares all earlier ones finished
        return self._coordinator.allocate(self._memory, max(num_bytes, 1), self.ranks)  # an empty file has no map

    def _free_snapshot(self, kind: _Kind) -> Slot:
        """A snapshot that no rank reads. It has its own storage, because saving a parameter saves its whole storage."""
        num_bytes, dtype = kind[0] * kind[1].itemsize, kind[1]

        def make(num: int) -> list[Slot]:
            made = [self._allocate(num_bytes) for _ in range(num)]
            return [Slot({rank: one[:num_bytes].view(dtype) for rank, one in views.items()}) for views in made]

        return self._snapshots.take(kind, self._coordinator.num_operations, make, self._coordinator.await_passed)

    def _staged(
        self, what: str, rows: Tensor, averages: "Averages | None" = None, *, comes_back: bool = False
    ) -> Iterator[tuple[Tensor, dict[int, Tensor]]]:
        """Yield pieces of ``rows`` as bytes, each with the same piece of every rank in the staging area. Collective.

        With ``comes_back`` each piece of ``rows`` is then overwritten with this rank's staged piece. With ``averages``
        their ranks alone take part, and only their pieces are there.
        """
        averages = averages or self._averages
        averages.complete_all()
        coordinator = averages.coordinator
        own = rows.view(-1).view(torch.uint8)
        for piece in own.split(STAGING_BYTES) if len(own) else ():
            staged = {rank: area[: len(piece)] for rank, area in self._staging.items()}
            staged[self.rank].copy_(piece)
            self._memory.publish()
            number = coordinator.arrive(f"a piece of {len(piece)} bytes of the {what} of {size_of(rows)}")
            coordinator.await_arrived(averages.ranks, number)
            yield piece, staged
            self._memory.publish()
            coordinator.finish(number)
            coordinator.await_finished(number)
            if comes_back:
                piece.copy_(staged[self.rank])


class _SnapshotExchange(Exchange):
    def __init__(
        self, comm: SegmentCommunicator, number: int, round_: Round, snapshot: Slot, kind: _Kind | None = None
    ) -> None:
        super().__init__(comm.learners, lambda _: round_)
        self._comm, self._number, self._round, self._snapshot = comm, number, round_, snapshot
        self._kind = kind  # of weights that are exchanged in place

    @override
    def received(self) -> Mapping[int, Tensor]:
        self._comm._coordinator.await_arrived(self._round.sources, self._number)
        self._comm._snapshots.hand_out(self._snapshot)
        return {source: self._snapshot.views[source] for source in self._round.sources}

    @override
    def new_row(self) -> Tensor | None:
        if self._kind is None:
            return None
        snapshot = self._comm._next[self._kind] = self._comm._free_snapshot(self._kind)
        return snapshot.views[self._comm.rank]

    @override
    def abandon(self) -> None:
        if self._kind is None:
            self._comm._snapshots.hand_out(self._snapshot)
        else:
            self._comm._next[self._kind] = self._snapshot


def _is_pair_or_idle(round_: Round) -> bool:
    """Whether a learner is idle, or averages half and half with one learner that does the same."""
    half = round_.self_weight == 0.5 and round_.weights == (0.5,) and round_.sources == round_.destinations
    return half or (not round_.sources and not round_.destinations)


class SharedMemoryCommunicator(SegmentCommunicator):
    """Learner j is rank j of the group. All ranks are processes of one user on one host.

    Args:
        group, timeout, among: see :class:`~ddpcore.comm.shared.segments.SegmentCommunicator`.
        in_thread: whether a thread of each rank computes averages that have begun, while the rank does other work;
            None: if there are at least two cores for each rank. With fewer cores it hides nothing.

    ValueError: there is no process group; or, on every rank, the ranks cannot reach each other's memory.
    """

    transport = "shm"

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float = launch.TIMEOUT_SECONDS,
        among: Sequence[int] | None = None,
        *,
        in_thread: bool | None = None,
    ) -> None:
        group = default_group(group)
        if in_thread is None:
            in_thread = 1 < (dist.get_world_size(group) if among is None else len(among)) <= launch.num_cores() // 2
        super().__init__(group, HostMemory(), timeout, "shared memory of one host", among, in_thread=in_thread)

    @override
    def live(self, weights_LP: Tensor, rule: PairMean | None = None) -> LiveWeights:
        rule = rule or PairMean()
        first = rule.first_rows(weights_LP)[0]
        parts = self._allocate(first.nbytes).values()
        rows = [part[: first.nbytes].view(first.dtype).view(first.shape) for part in parts]
        rows[self.rank].copy_(first)
        return SharedLiveWeights(self._coordinator, rows, rule)


_SLICE_SECONDS = 0.01  # the thread of a rank looks this often whether it must end


class _Begun(NamedTuple):
    number: int
    columns: list[Tensor]


class Averages:
    """Averages among some ranks, ascending, in the order in which they begin. No other rank takes part.

    ``in_thread``: a thread of this rank computes each average as soon as all ranks have begun it. Else the rank
    computes it when it waits for it. The bits are the same.
    """

    def __init__(
        self, coordinator: Coordinator, memory: Memory, ranks: Sequence[int], *, in_thread: bool = False
    ) -> None:
        self.coordinator, self._memory, self.ranks = coordinator, memory, ranks
        self._pending: deque[_Begun] = deque()
        self._lock = threading.Lock()  # who holds it computes
        self._begun = threading.Semaphore(0)
        if in_thread:
            is_closed = threading.Event()
            args = weakref.ref(self), self._begun, is_closed
            thread = threading.Thread(target=_compute, args=args, name="ddpcore averages", daemon=True)
            thread.start()
            weakref.finalize(self, _end, thread, self._begun, is_closed)

    def begin(self, text: str, columns: list[Tensor]) -> Work:
        """Begin to average the columns ``[P]`` of each rank, added in ascending order. ``text`` describes them."""
        try:  # not len(): the thread may complete averages meanwhile
            oldest: _Begun | None = self._pending[-NUM_TEXTS // 2]
        except IndexError:
            oldest = None
        if oldest is not None:  # the others must still be able to read its text
            self.complete(oldest.number)
        self._memory.publish()
        number = self.coordinator.arrive(text)
        self._pending.append(_Begun(number, columns))
        self._begun.release()
        return Work(lambda: self.complete(number))

    def share_(self, columns: list[Tensor]) -> None:
        """Average this rank's share of the columns ``[P]`` of each rank."""
        average_share_(columns, self.ranks.index(self.coordinator.rank))

    def complete(self, number: int) -> None:
        """Finish the averages up to an operation, and the later ones that all ranks have begun."""
        self._compute(number)
        self.coordinator.await_finished(number)

    def complete_all(self) -> None:
        """Finish all averages that have begun."""
        with self._lock:
            last = self._pending[-1] if self._pending else None
        if last is not None:
            self.complete(last.number)

    def compute_next(self, seconds: float) -> bool:
        """Compute what all ranks have begun, after a wait for the next average. Returns whether any is left."""
        with self._lock:
            first = self._pending[0] if self._pending else None
        if first is not None and self.coordinator.have_arrived(first.number, seconds):
            self._compute(-1)
        return bool(self._pending)

    def _compute(self, number: int) -> None:
        """Compute the averages up to an operation, for which this waits, and the later ones that all have begun."""
        coordinator, pending = self.coordinator, self._pending
        with self._lock:
            while pending:
                first = pending[0]
                if first.number <= number:
                    coordinator.await_passed(self.ranks, first.number)
                elif not coordinator.have_arrived(first.number):
                    return
                coordinator.check_same(self.ranks, first.number)
                try:
                    pending.popleft()  # now: columns that are half added must not be added again
                    self.share_(first.columns)
                    self._memory.publish()
                    coordinator.finish(first.number)
                except BaseException as error:  # an interrupt, too
                    with suppress(RuntimeError):
                        why = str(error).partition("\n")[0]
                        what = f"{type(error).__name__} ({why})" if why else type(error).__name__
                        coordinator.fail(f"rank {coordinator.rank} was stopped in the middle of an average by {what}")
                    raise


def _compute(reference: weakref.ref[Averages], begun: threading.Semaphore, is_closed: threading.Event) -> None:
    """The thread of a rank. It keeps no average alive. Its errors are raised where the rank waits next."""
    while begun.acquire() and not is_closed.is_set():
        is_left = True
        while is_left and not is_closed.is_set():
            averages = reference()
            try:
                is_left = averages is not None and averages.compute_next(_SLICE_SECONDS)
            except Exception:
                return
            del averages


def _end(thread: threading.Thread, begun: threading.Semaphore, is_closed: threading.Event) -> None:
    """End the thread. One that wakes up while the interpreter ends would abort the process."""
    is_closed.set()
    begun.release()
    if thread is not threading.current_thread():
        thread.join()
