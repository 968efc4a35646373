"""How rows travel between ranks that may die, and how these ranks find out who is left.

Shared memory: a flag never goes back, and a dead process writes none. So when every rank has either begun an operation
or is dead, all ranks see the same set of ranks that have begun it, without another message.

Process group: a rank cannot see what another one has received. So after the messages of an operation all members gather
its number: who gets all numbers knows that all members have received their rows. If that fails, the members that are
left tell each other, through the roll, the last operation that they have received: operations that all have received
are done, and the others are begun again in a new group.
"""

import hashlib
import secrets
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.groups import CALL_ALIKE, gather_objects, own_client, own_group
from ddpcore.comm.membership import POLL_SECONDS, Roll
from ddpcore.comm.shared.coordination import ControlAddress, Coordinator
from ddpcore.comm.shared.memory import HostMemory, Slot, Slots
from ddpcore.topology.rounds import Round

_SLICE_SECONDS = 0.1  # a waiting rank looks this often for a call of another one
_CONNECT_SECONDS = 10.0  # all members have come by then, unless one dies
_LEAST_BYTES = 4096  # areas have sizes of powers of two, so that few are needed
_RUN_KEY = "ddpcore/elastic run"
_MISMATCH = "ranks call different operations"

Members = tuple[int, ...]


def new_run(group: dist.ProcessGroup, timeout: float) -> dist.Store:
    """The place of a new run in the store of a group. Collective."""
    store = own_client(c10d._get_process_group_store(group))
    token = gather_objects(group, secrets.token_hex(8), "the start of the membership", timeout)[0]
    if dist.get_rank(group) == 0:
        store.set(_RUN_KEY, token)  # where a rank that joins later looks
    return dist.PrefixStore(f"ddpcore/{token}", store)


def last_run(store: dist.Store, timeout: float) -> dist.Store:
    """The place of the last run that was begun in a store. RuntimeError: there is none."""
    store = own_client(store)
    deadline = time.monotonic() + timeout
    while not store.check([_RUN_KEY]):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the store has no run with on_failure='shrink' after {timeout:g} s: start that first")
        time.sleep(POLL_SECONDS)
    return dist.PrefixStore(f"ddpcore/{bytes(store.get(_RUN_KEY)).decode()}", store)


@dataclass(kw_only=True)
class Operation:
    """One operation in progress."""

    number: int  # counted from 0 since the start of the run
    what: str  # the same text on all ranks
    step: int | None  # of training
    row: Tensor  # ``[x]``, of this rank; it does not change before the operation ends
    members: Members  # when it began
    round_of: Callable[[Members], Round]  # whom this rank reads from, and who reads from it, if these are the members
    in_place: bool = False  # whether readers read ``row`` itself
    place: Any = None  # what the fabric keeps
    come: Members | None = None  # who has published its row, once that is known

    def __str__(self) -> str:
        return f"{self.what}, number {self.number}"


class Fabric(ABC):
    """Carries the rows of operations between ranks, and finds out which ranks are left."""

    rank: int  # the id of this rank; -1 before it takes part
    members: Members  # ids of the ranks that it connects
    kind: str  # ``shm``, or the backend of the process group
    description: str  # the transport, as text for people
    address: Any = None  # plain values by which another rank finds this one
    waited: Mapping[int, float]  # see :attr:`Communicator.waited`

    def __init__(self, roll: Roll) -> None:
        self.roll, self.rank, self.members, self.waited = roll, -1, (-1,), {}
        weakref.finalize(self, roll.close)

    def take(self, rank: int, members: Members) -> None:
        """Be this rank from now on, and connect these members, itself among them."""
        self.rank, self.members = rank, members
        self.roll.rank = rank

    @abstractmethod
    def position(self) -> int:
        """A number that a rank which joins now must know."""

    @abstractmethod
    def join(self, rank: int, members: Members, position: int) -> None:
        """Become a rank of a run that has begun, with these members, itself among them."""

    @abstractmethod
    def admit(self, one: int, address: Any, members: Members) -> None:
        """Connect a rank that joins, between two operations. It may have died."""

    @abstractmethod
    def begin(self, operation: Operation) -> None:
        """Publish the row. It returns without waiting for other ranks, except to allocate memory."""

    @abstractmethod
    def agree(self, operation: Operation) -> Members:
        """Wait until all members have published their rows or are dead. Returns those that have, on every rank alike.

        Called in the order of operations. RuntimeError: a member lives and does not come in time, or calls another one.
        """

    @abstractmethod
    def rows(self, operation: Operation, members: Sequence[int]) -> dict[int, Tensor]:
        """The rows of other members, which they have published. Valid until :meth:`done`."""

    @abstractmethod
    def done(self, operation: Operation) -> None:
        """This rank has read the rows, or will have read them before it begins the next operation."""

    def next_row(self, operation: Operation) -> Tensor | None:
        """Where an operation in place writes the new row; None: into the row itself."""
        return None


class SharedMemoryFabric(Fabric):
    """Publishes rows in areas of shared memory. The members are the ranks of one host.

    An area is written again when all members have begun an operation that comes after the reading. Weights that are
    exchanged in place lie in such an area, and the step writes the new weights into another one.
    """

    kind = "shm"

    def __init__(self, roll: Roll, coordinator: Coordinator) -> None:
        super().__init__(roll)
        self._coordinator, self._memory = coordinator, HostMemory()
        self.address, self.waited = tuple(coordinator.address), coordinator.waited
        self._areas = Slots()
        self._own: Slot | None = None  # where weights lie that are exchanged in place
        self.description = "shared memory of one host"

    @override
    def take(self, rank: int, members: Members) -> None:
        super().take(rank, members)
        self.description = f"shared memory of one host, {len(members)} ranks"
        self.roll.write(f"address/{rank}", self.address)

    @override
    def position(self) -> int:
        return self._coordinator.num_operations

    @override
    def join(self, rank: int, members: Members, position: int) -> None:
        addresses = {one: ControlAddress(*self.roll.read(f"address/{one}")) for one in members if one != rank}
        self._coordinator.join(rank, addresses, position)
        self.take(rank, members)

    @override
    def admit(self, one: int, address: Any, members: Members) -> None:
        self._coordinator.admit(one, ControlAddress(*address))
        self._areas = Slots()  # the new rank has no old ones, so all ranks allocate new ones when they need them
        self._own = None
        self.take(self.rank, members)

    @override
    def begin(self, operation: Operation) -> None:
        row = operation.row.view(torch.uint8)
        self._areas.note_used(self._coordinator.num_operations)
        area = self._own if operation.in_place else None
        if area is None or area.views[self.rank].data_ptr() != row.data_ptr():
            area = self._free_area(row.numel())
            area.views[self.rank][: row.numel()].copy_(row)
        area.used = None
        operation.place = area, self._coordinator.arrive(str(operation))

    @override
    def agree(self, operation: Operation) -> Members:
        _, number = operation.place
        come = (*self._coordinator.await_arrived(operation.members, number, may_die=True),)
        self.members = tuple(one for one in self.members if one in come)  # nobody waits for the dead again
        return come

    @override
    def rows(self, operation: Operation, members: Sequence[int]) -> dict[int, Tensor]:
        area, _ = operation.place
        num_bytes, dtype = operation.row.nbytes, operation.row.dtype
        return {one: area.views[one][:num_bytes].view(dtype) for one in members}

    @override
    def done(self, operation: Operation) -> None:
        self._areas.hand_out(operation.place[0])

    @override
    def next_row(self, operation: Operation) -> Tensor | None:
        if not operation.in_place:
            return None
        self._own = self._free_area(operation.row.nbytes)
        return self._own.views[self.rank][: operation.row.nbytes].view(operation.row.dtype)

    def _free_area(self, num_bytes: int) -> Slot:
        """An area that no rank reads."""
        size = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length()) if num_bytes else _LEAST_BYTES

        def make(num: int) -> list[Slot]:  # in one piece, because ranks wait twice for each
            views = self._coordinator.allocate(self._memory, num * size, self.members, may_die=True)
            parts = {rank: view.split(size) for rank, view in views.items()}
            return [Slot({rank: part[place] for rank, part in parts.items()}) for place in range(num)]

        def await_passed(_: Sequence[int], number: int) -> None:  # of all members: slots have no readers here
            self._coordinator.await_passed(self.members, number, may_die=True)

        return self._areas.take(size, self._coordinator.num_operations, make, await_passed)


@dataclass
class _Flight:
    """The messages of an operation, in one group."""

    group: "_Group"
    rows: dict[int, Tensor]  # that are received, by their rank
    works: list[Any] = field(default_factory=list)  # of torch
    error: str = ""
    ended: threading.Event = field(default_factory=threading.Event)  # the wait has ended, with an error or without
    is_waited: bool = False  # the wait has begun
    is_received: bool = False  # all rows are here
    is_done: bool = False  # all members have received their rows


class _Group:
    """One generation: a group of torch, made without the default group, which a dead rank has spoiled.

    A thread waits for transfers, because a wait of gloo cannot be interrupted. A member that died since it came is
    found out by the first operation: ``error`` says why the group could not be made.
    """

    def __init__(self, roll: Roll, backend: str, members: Members, rank: int, device: torch.device) -> None:
        self.members, self._device, self.error = members, device, ""
        self._is_nccl = backend == "nccl"
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        if len(members) == 1:
            return
        store = dist.PrefixStore(f"{roll.generation}/group", roll.store)
        try:
            self._group = own_group({device.type: backend}, store, members.index(rank), len(members), _CONNECT_SECONDS)
        except RuntimeError as error:
            self.error = _first_line(error)
            return
        self._limit = timedelta(seconds=min(_CONNECT_SECONDS, roll.timeout))  # after which the roll is called
        if not self._is_nccl:
            self._group.set_timeout(timedelta(seconds=roll.timeout))
        threading.Thread(target=_wait_for_transfers, args=(self._jobs,), daemon=True, name="ddpcore-transfers").start()
        weakref.finalize(self, self._jobs.put, None)

    def transfer(self, number: int, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> list[Any]:
        """Start messages from and to members."""
        if self.error:
            raise RuntimeError(self.error)
        if not sends and not receives:
            return []
        if self._is_nccl:
            self._group._start_coalescing(self._device)
        works = [self._group.send([row], self.members.index(to), number) for to, row in sends]
        works += [self._group.recv([row], self.members.index(source), number) for source, row in receives]
        return [self._group._end_coalescing(self._device)] if self._is_nccl else works

    def start_wait(self, flight: _Flight, operation: Operation) -> None:
        """Let the thread wait for its own rows of an operation, and then for the rows of all members."""
        group, device, num = self._group, self._device, len(self.members)

        def wait() -> None:
            try:
                for work in flight.works:
                    work.wait(*(() if self._is_nccl else (self._limit,)))
                flight.is_received = True
                digest = hashlib.blake2b(str(operation).encode(), digest_size=7).digest()
                own = torch.tensor([int.from_bytes(digest, "little")], device=device)
                everyone = [torch.empty_like(own) for _ in range(num)]
                group.allgather([everyone], [own]).wait()
                if len(set(torch.cat(everyone).tolist())) > 1:
                    flight.error = f"{_MISMATCH}, this one {operation.what}: {CALL_ALIKE}"
            except RuntimeError as error:
                flight.error = _first_line(error)
            flight.ended.set()

        flight.is_waited = True
        self._jobs.put(wait)


def _wait_for_transfers(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (wait := jobs.get()) is not None:
        wait()
        del wait  # which would keep the group


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class ProcessGroupFabric(Fabric):
    """Sends the rows of operations on a device over ``gloo`` or ``nccl``."""

    def __init__(self, roll: Roll, backend: str, device: torch.device) -> None:
        super().__init__(roll)
        self.kind, self.description, self._device = backend, f"torch.distributed, {backend}", device
        self._flying: dict[int, Operation] = {}  # begun, not yet known to be done by all members
        self._received = -1  # the last operation of which this rank has all rows

    @override
    def take(self, rank: int, members: Members) -> None:
        super().take(rank, members)
        self.roll.generation += 1
        self._group = _Group(self.roll, self.kind, members, rank, self._device)

    @override
    def position(self) -> int:
        return self.roll.generation

    @override
    def join(self, rank: int, members: Members, position: int) -> None:
        self.roll.generation = position
        self.take(rank, members)

    @override
    def admit(self, one: int, address: Any, members: Members) -> None:
        self.take(self.rank, members)

    @override
    def begin(self, operation: Operation) -> None:
        self._flying[operation.number] = operation
        self._send(operation)

    def _send(self, operation: Operation) -> None:
        round_ = operation.round_of(self._group.members)
        flight = _Flight(self._group, {source: torch.empty_like(operation.row) for source in round_.sources})
        operation.place = flight
        sends = [(reader, operation.row) for reader in round_.destinations]
        try:
            flight.works = self._group.transfer(operation.number, sends, list(flight.rows.items()))
        except RuntimeError as error:  # agree() begins it again
            flight.error = _first_line(error)

    @override
    def agree(self, operation: Operation) -> Members:
        while not operation.place.is_done:
            if not self._is_done(operation):
                self._renew(operation)
        self._received = operation.number
        self._flying.pop(operation.number, None)
        return operation.place.group.members

    def _is_done(self, operation: Operation) -> bool:
        """Wait for the messages of an operation and for all members. Returns whether nothing failed anywhere."""
        flight: _Flight = operation.place
        if not flight.error and len(flight.group.members) > 1:
            if not flight.is_waited:
                flight.group.start_wait(flight, operation)
            while not flight.ended.wait(_SLICE_SECONDS):
                if self.roll.is_called():
                    return False  # another rank saw a failure
            if _MISMATCH in flight.error:
                raise RuntimeError(flight.error)
        flight.is_done = not flight.error
        return flight.is_done

    def _renew(self, operation: Operation) -> None:
        """Go on to the next generation, and begin again what not all of its members have received."""
        last = operation.number if operation.place.is_received else self._received
        self.members, received = self.roll.next_generation(self._group.members, last)
        self._group = _Group(self.roll, self.kind, self.members, self.rank, self._device)
        for number, flying in sorted(self._flying.items()):
            if number <= min(received):
                flying.place.is_done = True
            else:
                self._send(flying)

    @override
    def rows(self, operation: Operation, members: Sequence[int]) -> dict[int, Tensor]:
        return {one: operation.place.rows[one] for one in members}

    @override
    def done(self, operation: Operation) -> None:
        operation.place.works.clear()
