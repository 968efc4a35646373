"""Ranks of one host that may die: rows are published in shared memory, and the flags of a dead rank stay readable.

A flag never goes back and a dead process writes none. So when every rank has either begun an operation or is dead, all
ranks see the same set of ranks that have begun it, without another message.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.fabric import Fabric, GenerationStore, Members, Operation, new_run
from ddpcore.comm.groups import default_group
from ddpcore.comm.shared.coordination import ControlAddress, Coordinator
from ddpcore.comm.shared.memory import HostMemory, Slot, Slots

_LEAST_BYTES = 4096  # areas have sizes of powers of two, so that few are needed


class SharedMemoryFabric(Fabric):
    """Publishes rows in areas of shared memory. The members are the ranks of one host.

    An area is written again when all members have begun an operation that comes after the reading. Weights that are
    exchanged in place lie in such an area, and the step writes the new weights into another one.

    Args:
        group: a process group, used only for setting up; None is the default group.
        timeout: seconds that a living rank may let the others wait.
        ids: of the ranks, ascending; None: as in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float, ids: Members | None = None) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}: it must be above 0 seconds")
        group = default_group(group)
        coordinator = Coordinator(group, timeout, ids)
        self._set_up(coordinator, GenerationStore(new_run(group, timeout), coordinator.rank, timeout))
        self._take(tuple(range(coordinator.num_ranks)) if ids is None else ids)

    def _set_up(self, coordinator: Coordinator, roll: GenerationStore) -> None:
        self._coordinator, self.roll, self._memory = coordinator, roll, HostMemory()
        self.kind, self.address = "shm", tuple(coordinator.address)
        self._areas: dict[int, Slots] = {}  # by size
        self._read: list[Slot] = []  # whose rows are read before the next operation begins
        self._own: Slot | None = None  # where weights lie that are exchanged in place
        weakref.finalize(self, roll.close)

    def _take(self, members: Members) -> None:
        self.rank, self.members = self._coordinator.rank, members
        self.description = f"shared memory of one host, {len(members)} ranks"
        self.roll.write(f"address/{self.rank}", self.address)

    @classmethod
    def of_newcomer(cls, roll: GenerationStore) -> SharedMemoryFabric:
        """The fabric of a rank that joins later. It has no rank before :meth:`join`."""
        made = cls.__new__(cls)
        made._set_up(Coordinator.of_newcomer(roll.timeout), roll)
        made.rank, made.members, made.description = -1, (-1,), "shared memory of one host"
        return made

    @property
    @override
    def position(self) -> int:
        return self._coordinator.num_operations

    @override
    def join(self, rank: int, members: Members, position: int) -> None:
        addresses = {one: ControlAddress(*self.roll.read(f"address/{one}")) for one in members if one != rank}
        self._coordinator.join(rank, addresses, position)
        self.roll.enter(rank)
        self._take(members)

    @override
    def admit(self, one: int, address: Any, members: Members) -> None:
        self._coordinator.admit(one, ControlAddress(*address))
        self._areas.clear()  # the new rank has none of them, so all ranks allocate new ones when they need them
        self._own = None
        self._read.clear()
        self._take(members)

    @property
    @override
    def waited(self) -> Mapping[int, float]:
        return self._coordinator.waited

    @override
    def begin(self, operation: Operation) -> None:
        row = operation.row.view(torch.uint8)
        for area in self._read:
            area.used = self._coordinator.num_operations
        self._read.clear()
        mine = self._own if operation.in_place else None
        area = mine if mine is not None and self._lies_in(mine, row) else self._free_area(row.numel())
        area.used = None
        own = area.views[self.rank][: row.numel()]
        if own.data_ptr() != row.data_ptr():
            own.copy_(row)
        operation.place = area, self._coordinator.arrive(f"{operation.what}, number {operation.number}")

    @override
    def agree(self, operation: Operation) -> Members:
        _, number = operation.place
        come = (*self._coordinator.await_living(operation.members, number),)
        self.members = tuple(one for one in self.members if one in come)  # nobody waits for the dead again
        return come

    @override
    def rows(self, operation: Operation, members: Sequence[int]) -> dict[int, Tensor]:
        area, _ = operation.place
        num_bytes, dtype = operation.row.nbytes, operation.row.dtype
        return {one: area.views[one][:num_bytes].view(dtype) for one in members}

    @override
    def done(self, operation: Operation) -> None:
        self._read.append(operation.place[0])

    @override
    def next_row(self, operation: Operation) -> Tensor | None:
        if not operation.in_place:
            return None
        self._own = self._free_area(operation.row.nbytes)
        return self._own.views[self.rank][: operation.row.nbytes].view(operation.row.dtype)

    def _lies_in(self, area: Slot, row: Tensor) -> bool:
        return area.views[self.rank].data_ptr() == row.data_ptr()

    def _free_area(self, num_bytes: int) -> Slot:
        """An area that no rank reads."""
        size = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length()) if num_bytes else _LEAST_BYTES
        return self._areas.setdefault(size, Slots()).take(
            self._coordinator.num_operations,
            lambda num: self._new_areas(size, num),
            self._await_readers,
        )

    def _await_readers(self, slot: Slot) -> None:
        assert slot.used is not None
        self._coordinator.await_living(self.members, slot.used, same=False)

    def _new_areas(self, size: int, num: int) -> list[Slot]:
        """Allocate zeros on each rank, for all areas in one piece: in each piece ranks wait twice. Collective."""
        coordinator = self._coordinator
        own, handle = self._memory.allocate(num * size)
        number = coordinator.arrive(f"the allocation of {num * size} bytes", handle)
        views = {self.rank: own}
        for rank in coordinator.await_living(self.members, number):
            if rank == self.rank:
                continue
            try:
                views[rank] = self._memory.open(coordinator.pids[rank], coordinator.handle_of(rank), num * size)
            except (OSError, ValueError) as error:  # the rank died after it arrived, so it begins no other operation
                if coordinator.is_alive(rank):
                    coordinator.fail_to_read(rank, number, error)
        coordinator.finish(number)
        coordinator.await_living(self.members, number, finished=True)
        parts = {rank: view.split(size) for rank, view in views.items()}
        return [Slot({rank: part[place] for rank, part in parts.items()}) for place in range(num)]
