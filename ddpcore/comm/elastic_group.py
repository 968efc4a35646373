"""Ranks of a process group that may die: messages between them, and a new group of those that are left.

A rank cannot see what another one has received. So after the messages of an operation all members gather its number:
who gets all numbers knows that all members have received their rows. If that fails, the members that are left tell each
other, through the store, the last operation that they have received: operations that all have received are done, and
the others are begun again in a new group.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.fabric import Fabric, GenerationStore, Members, Operation, new_run
from ddpcore.comm.groups import default_group, own_group

_SLICE_SECONDS = 0.1  # a waiting rank looks this often for a call of another one
_CONNECT_SECONDS = 10.0  # all members have come by then, unless one dies


class _Worker:
    """A thread that waits for transfers, because a wait of gloo cannot be interrupted."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], _Outcome] | None] = SimpleQueue()
        threading.Thread(target=self._run, args=(self._jobs,), daemon=True, name="ddpcore-transfers").start()
        weakref.finalize(self, self._jobs.put, None)

    @staticmethod
    def _run(jobs: SimpleQueue[tuple[Callable[[], None], _Outcome] | None]) -> None:
        while (job := jobs.get()) is not None:
            call, outcome = job
            try:
                call()
            except RuntimeError as error:
                outcome.error = str(error).partition("\n")[0]
            del call
            outcome.done.set()
            del outcome, job

    def start(self, call: Callable[[], None]) -> _Outcome:
        outcome = _Outcome()
        self._jobs.put((call, outcome))
        return outcome


@dataclass
class _Outcome:
    done: threading.Event = field(default_factory=threading.Event)
    error: str = ""


class _Group:
    """One generation: a group of torch, made without the default group, which a dead rank has spoiled."""

    def __init__(
        self, backend: str, store: dist.Store, members: Members, rank: int, device: torch.device, wait_seconds: float
    ) -> None:
        index, num = members.index(rank), len(members)
        self.members, self.device, self._worker, self.error = members, device, _Worker(), ""
        self._is_nccl = backend == "nccl"
        if num == 1:
            return
        self._group = own_group({device.type: backend}, store, index, num, _CONNECT_SECONDS)
        if not self._is_nccl:
            self._group.set_timeout(timedelta(seconds=wait_seconds))

    @classmethod
    def broken(cls, members: Members, why: str) -> _Group:
        """A group that could not be made."""
        made = cls.__new__(cls)
        made.members, made.error = members, why
        return made

    def transfer(self, number: int, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> list[Any]:
        """Start messages from and to members."""
        if self.error:
            raise RuntimeError(self.error)
        if not sends and not receives:
            return []
        if self._is_nccl:
            self._group._start_coalescing(self.device)
        works = [self._group.send([row], self.members.index(to), number) for to, row in sends]
        works += [self._group.recv([row], self.members.index(source), number) for source, row in receives]
        return [self._group._end_coalescing(self.device)] if self._is_nccl else works

    def numbers(self, number: int) -> list[int]:
        """Gather a number of each member."""
        own = torch.tensor([number], device=self.device)
        everyone = [torch.empty_like(own) for _ in self.members]
        self._group.allgather([everyone], [own]).wait()
        return torch.cat(everyone).tolist()

    def start(self, call: Callable[[], None]) -> _Outcome:
        return self._worker.start(call)


@dataclass
class _Flight:
    """The messages of an operation: in which group, and the received rows by their rank."""

    group: _Group
    works: list[Any]
    rows: dict[int, Tensor]
    error: str = ""
    outcome: _Outcome | None = None
    is_received: bool = False
    is_done: bool = False  # all members have received their rows


class ProcessGroupFabric(Fabric):
    """Sends the rows of operations over gloo or NCCL.

    Args:
        group: a process group, used only for setting up and for its store; None is the default group.
        device: of the rows.
        timeout: seconds that a living rank may let the others wait after a failure.
        ids: of the ranks, ascending; None: as in the group.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, timeout: float, ids: Members | None = None
    ) -> None:
        group = default_group(group)
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}: it must be above 0 seconds")
        self._backend, self._device = str(dist.get_backend(group)), device
        self.members = tuple(range(dist.get_world_size(group))) if ids is None else ids
        self.rank = self.members[dist.get_rank(group)]
        self.description, self.kind = f"torch.distributed, {self._backend}", self._backend
        self.roll = GenerationStore(new_run(group, timeout), self.rank, timeout)
        self._group = self._connect(self.members)
        self._flying: dict[int, Operation] = {}  # begun, not yet known to be done by all members
        self._received = -1  # the last operation of which this rank has all rows
        weakref.finalize(self, self.roll.close)

    @classmethod
    def of_newcomer(cls, roll: GenerationStore, backend: str, device: torch.device) -> ProcessGroupFabric:
        """The fabric of a rank that joins later. It has no rank before :meth:`join`."""
        made = cls.__new__(cls)
        made._backend, made._device, made.roll = backend, device, roll
        made._flying, made._received, made.members, made.rank = {}, -1, (-1,), -1
        made.description, made.kind = f"torch.distributed, {backend}", backend
        weakref.finalize(made, roll.close)
        return made

    @override
    def join(self, rank: int, members: Members, position: int) -> None:
        self.rank, self.roll.generation = rank, position
        self.roll.enter(rank)
        self._take(members)

    @property
    @override
    def position(self) -> int:
        return self.roll.generation

    @override
    def admit(self, one: int, address: Any, members: Members) -> None:
        self._take(members)

    def _take(self, members: Members) -> None:
        """Connect other members in the next generation."""
        self.roll.generation += 1
        self.members = members
        self._group = self._connect(members)

    def _connect(self, members: Members) -> _Group:
        """A group of this generation. A member that died since it came is found out by the first operation."""
        try:
            store = self.roll.group_store()
            return _Group(self._backend, store, members, self.rank, self._device, self.roll.timeout)
        except RuntimeError as error:
            return _Group.broken(members, str(error).partition("\n")[0])

    @override
    def begin(self, operation: Operation) -> None:
        self._flying[operation.number] = operation
        self._send(operation)

    def _send(self, operation: Operation) -> None:
        group = self._group
        round_ = operation.round_of(group.members)
        rows = {source: torch.empty_like(operation.row) for source in round_.sources}
        operation.place = flight = _Flight(group, [], rows)
        sends = [(reader, operation.row) for reader in round_.destinations]
        try:
            flight.works = group.transfer(operation.number, sends, list(rows.items()))
        except RuntimeError as error:  # agree() begins it again
            flight.error = str(error).partition("\n")[0]

    @override
    def agree(self, operation: Operation) -> Members:
        while not operation.place.is_done:
            if self._wait(operation):
                self._renew(operation)
        self._received = operation.number
        self._flying.pop(operation.number, None)
        return operation.place.group.members

    def _wait(self, operation: Operation) -> str:
        """Wait for the messages of an operation and for all members. Returns why that failed, or nothing."""
        flight = operation.place
        if flight.error:
            return flight.error
        if len(flight.group.members) == 1:
            flight.is_done = True
            return ""

        def receive() -> None:
            for work in flight.works:
                work.wait()
            flight.is_received = True
            _check_same(operation, flight.group.numbers(_digest(operation)))

        flight.outcome = flight.outcome or flight.group.start(receive)
        while not flight.outcome.done.wait(_SLICE_SECONDS):
            if self.roll.is_called:
                return "another rank saw a failure"
        flight.error = flight.outcome.error
        if _MISMATCH in flight.error:
            raise RuntimeError(flight.error)
        flight.is_done = not flight.error
        return flight.error

    def _renew(self, operation: Operation) -> None:
        """Go on to the next generation, and begin again what not all of its members have received."""
        last = operation.number if operation.place.is_received else self._received
        members, received = self.roll.next_generation(self._group.members, last)
        self._group, self.members = self._connect(members), members
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


_MISMATCH = "ranks call different operations"


def _digest(operation: Operation) -> int:
    text = f"{operation.what}, number {operation.number}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _check_same(operation: Operation, digests: list[int]) -> None:
    if len(set(digests)) > 1:
        raise RuntimeError(
            f"{_MISMATCH}, this one {operation.what}: all ranks must call the same in the same order, so run a pass of "
            "one rank alone under torch.no_grad(), and evaluation_model(), consensus_distance() and load_state_dict() "
            "on all ranks"
        )
