"""Coordination of the ranks of one host: progress counters, and the detection of dead ranks and of faults.

All ranks call the same operations in the same order, so an operation has the same number on every rank. Each rank owns
a control segment that the others can read: two counters, the texts of its latest operations, and a fault message.

``arrived``: once the counter is above i, other ranks may read this rank's data of operation i and all earlier ones.
``finished``: once the counter is above i, this rank has read all data of operation i and written its share of it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from ddpcore.comm.groups import gather_objects
from ddpcore.comm.shared import memory
from ddpcore.comm.shared.flags import LINE_BYTES, Flags

ARRIVED, FINISHED, FAULT = 0, 1, 2  # flags, one cache line each
_TOKEN, _HANDLE, _WHY, _TEXTS = 3 * LINE_BYTES, 256, 1280, 2048  # offsets in bytes
_TEXT_BYTES, NUM_TEXTS = 128, 512
_CONTROL_BYTES = _TEXTS + _TEXT_BYTES * NUM_TEXTS
SLICE_SECONDS = 0.2  # a waiting rank checks this often whether the others are alive
DYING_SECONDS = 2.0  # longest time between the first file that a dying process loses and the release of its lock


class Unreachable(ValueError):
    """The ranks of a group cannot reach each other's memory. It is raised on every rank."""


class ControlAddress(NamedTuple):
    """Where another process finds the control segment of a rank."""

    host: str
    pid: int
    descriptor: int
    token: str


def host_id() -> str:
    """Return a text that is equal in all processes of a running machine and differs between machines."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class Coordinator:
    """Coordinates the ranks of a group on one host. The constructor is collective.

    Args:
        group: an initialised process group, used only by the constructor.
        timeout: seconds that a living rank may let the others wait.
        ids: the number of each rank here; None: as in the group.
        among: the numbers of those ranks of the group that this rank coordinates with; None: all.

    Raises:
        Unreachable: on every rank: they are not on one host, or cannot reach each other's memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: float,
        ids: Sequence[int] | None = None,
        among: Sequence[int] | None = None,
    ) -> None:
        self.num_ranks = dist.get_world_size(group)
        ids = range(self.num_ranks) if ids is None else ids
        self._begin(ids[dist.get_rank(group)], timeout)
        why = ""
        try:
            self._create()
        except (OSError, AttributeError) as error:  # AttributeError: no memfd_create on this system
            why = f"rank {self.rank} cannot make shared memory ({error})"
        addresses = gather_objects(group, self.address, "the set-up of shared memory", timeout)
        known = dict(zip(ids, addresses, strict=True))
        known = known if among is None else {rank: known[rank] for rank in among}
        hosts = {other.host for other in known.values()}
        if len(hosts) > 1 and not why:
            why = f"the {len(known)} ranks are on {len(hosts)} hosts"
        try:
            if not why:
                self.meet(known)
        except (OSError, ImportError) as error:  # ImportError: no flags for this processor
            why = f"rank {self.rank} cannot open the memory of another ({error})"
        answers = gather_objects(group, why, "the set-up of shared memory", timeout)
        reasons = [reason for reason in answers if reason]
        if reasons:
            self.close()
            raise Unreachable(f"shared memory does not connect these ranks: {reasons[0]}: use --transport pg")

    def _begin(self, rank: int, timeout: float) -> None:
        self._descriptors: dict[int, int] = {}  # of the control files, by rank
        self._controls: dict[int, mmap.mmap] = {}
        self._flags: dict[int, Any] = {}
        self.pids: dict[int, int] = {}
        self.rank, self.timeout = rank, timeout
        self.others: list[int] = []
        self.num_operations = 0
        self.waited: dict[int, float] = {}  # seconds
        self._fault = ""
        self.address = ControlAddress(host_id(), os.getpid(), -1, secrets.token_bytes(16).hex())

    @classmethod
    def of_newcomer(cls, timeout: float) -> Coordinator:
        """The coordinator of a rank that joins later. It has no number before :meth:`join`. OSError: no memory."""
        made = cls.__new__(cls)
        made._begin(-1, timeout)
        made._create()
        return made

    def join(self, rank: int, addresses: Mapping[int, ControlAddress], num_operations: int) -> None:
        """Become a rank, between two operations of the others. OSError: one of them cannot be reached."""
        self._descriptors[rank] = self._descriptors.pop(self.rank)
        self.rank, self.num_operations = rank, num_operations
        self.num_ranks = len(addresses) + 1
        self.meet({**addresses, rank: self.address})

    def admit(self, rank: int, address: ControlAddress) -> None:
        """Meet a rank that joins. If it has died already, it never comes to an operation."""
        self._flags.pop(rank, None)  # of a rank that died, whose number is given again
        with suppress(OSError):
            self.meet({rank: address})

    def meet(self, addresses: Mapping[int, ControlAddress]) -> None:
        """Open the control segments of ranks. OSError: one cannot be reached."""
        for rank, address in addresses.items():
            self._controls[rank] = self._open(rank, address)
            self._flags[rank] = Flags(self._controls[rank])
            self.pids[rank] = address.pid
            self.waited.setdefault(rank, 0.0)
        self.others = sorted(set(self._flags).difference([self.rank]))

    def _create(self) -> None:
        descriptor = memory.create_file(_CONTROL_BYTES)
        self._descriptors[self.rank] = descriptor
        self._own = mmap.mmap(descriptor, _CONTROL_BYTES)
        token = self.address.token.encode()
        self._own[_TOKEN : _TOKEN + len(token)] = token
        memory.hold(descriptor)
        self.address = self.address._replace(descriptor=descriptor)

    def _open(self, rank: int, address: ControlAddress) -> mmap.mmap:
        if rank == self.rank:
            return self._own
        descriptor = memory.open_file(address.pid, address.descriptor)
        if rank in self._descriptors:  # of a rank that died, whose number is given again
            os.close(self._descriptors[rank])
        self._descriptors[rank] = descriptor
        control = mmap.mmap(descriptor, _CONTROL_BYTES)
        if control[_TOKEN : _TOKEN + len(address.token)] != address.token.encode():  # in another PID namespace
            raise OSError(f"process {address.pid} is not rank {rank}: another container?")
        return control

    def close(self) -> None:
        """Close the control files. The other ranks then see this rank as gone."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __del__(self) -> None:
        self.close()

    # --- operations ----------------------------------------------------------------------------------------------

    def arrive(self, text: str, handle: bytes = b"") -> int:
        """Begin the next operation and return its number. ``text`` describes it and is equal on all ranks."""
        if self._fault:
            raise RuntimeError(self._fault)
        number = self.num_operations
        self.num_operations += 1
        _write(self._own, _TEXTS + number % NUM_TEXTS * _TEXT_BYTES, text.encode(), _TEXT_BYTES)
        if handle:
            _write(self._own, _HANDLE, handle, _WHY - _HANDLE)
        self._flags[self.rank].post(ARRIVED, number + 1)
        return number

    def have_arrived(self, number: int, seconds: float = 0.0) -> bool:
        """Return whether all ranks have begun this operation, after a wait of at most that long for each of them."""
        return all(flags.wait(ARRIVED, number + 1, seconds) for flags in self._flags.values())

    def await_arrived(self, ranks: Iterable[int], number: int) -> None:
        """Wait until these ranks have begun this operation, and check that it is the same operation.

        Raises:
            RuntimeError: a rank is gone, does not arrive in time, or calls another operation. It names both.
        """
        self.check_same(self._wait(ranks, ARRIVED, number), number)

    def check_same(self, ranks: Iterable[int], number: int) -> None:
        """Check that these ranks, which have begun an operation of this number, have begun the same operation.

        Raises:
            RuntimeError: a rank calls another operation. It names both.
        """
        if self.num_operations - number > NUM_TEXTS // 2:
            return  # an old exchange, whose texts may be overwritten; the texts of later operations were compared
        mine = self._text(self.rank, number)
        for rank in ranks:
            theirs = self._text(rank, number)
            if theirs != mine:
                self.fail(
                    f"rank {rank} came to operation {number} with {theirs}, rank {self.rank} with {mine}: all ranks "
                    "must call the same in the same order, so run a pass of one rank alone under torch.no_grad()"
                )

    def finish(self, number: int) -> None:
        """Tell the others that this rank has finished this operation and all earlier ones."""
        self._flags[self.rank].post(FINISHED, number + 1)

    def await_passed(self, ranks: Iterable[int], number: int) -> None:
        """Wait until these ranks have begun this operation, without a check that it is the same."""
        self._wait(ranks, ARRIVED, number)

    def await_finished(self, number: int, ranks: Iterable[int] | None = None) -> None:
        """Wait until these ranks, or for None all, have finished this operation."""
        self._wait(self.others if ranks is None else ranks, FINISHED, number)

    def await_living(
        self, ranks: Iterable[int], number: int, *, finished: bool = False, same: bool = True
    ) -> list[int]:
        """Wait until each of these ranks has begun (or finished) this operation or is dead. Returns those that have.

        The result is the same on every rank that lives, see :mod:`ddpcore.comm.shared.elastic`.

        Raises:
            RuntimeError: a living rank does not arrive in time or, with ``same``, calls another operation.
        """
        flag = FINISHED if finished else ARRIVED
        come = [rank for rank in ranks if self._has_come_before_death(rank, flag, number)]
        if same and not finished:
            self.await_arrived([rank for rank in come if rank != self.rank], number)  # compares the texts
        return come

    def _has_come_before_death(self, rank: int, flag: int, number: int) -> bool:
        if rank not in self._flags:
            return False
        began = time.perf_counter()
        deadline = time.monotonic() + self.timeout
        try:
            while not self._flags[rank].wait(flag, number + 1, SLICE_SECONDS):
                if not memory.is_held(self._descriptors[rank]):
                    return self._flags[rank].wait(flag, number + 1, 0.0)  # it may have come just before it died
                self._check_others((), lambda _: True, number)
                if time.monotonic() > deadline:
                    self._fail_late(rank, number)
            return True
        finally:
            if rank != self.rank:
                self.waited[rank] += time.perf_counter() - began

    def is_alive(self, rank: int) -> bool:
        """Whether the process of a rank has not died, waiting for one that is about to die."""
        deadline = time.monotonic() + DYING_SECONDS
        while memory.is_held(self._descriptors[rank]):  # a process that is being killed loses its files one by one
            if time.monotonic() > deadline:
                return True
            time.sleep(0.01)
        return False

    def handle_of(self, rank: int) -> bytes:
        """Return the last handle that a rank passed to :meth:`arrive`."""
        return _read(self._controls[rank], _HANDLE)

    def fail_to_read(self, rank: int, number: int, error: Exception) -> NoReturn:
        """Raise on all ranks that the memory of a rank cannot be opened, usually because the rank died."""
        if self.is_alive(rank):
            self.fail(f"rank {rank} cannot be read by rank {self.rank} ({error})")
        self.fail(self._gone(rank, number))

    # --- waiting and faults --------------------------------------------------------------------------------------

    def _text(self, rank: int, number: int) -> str:
        return _read(self._controls[rank], _TEXTS + number % NUM_TEXTS * _TEXT_BYTES).decode()

    def _wait(self, ranks: Iterable[int], flag: int, number: int) -> Sequence[int]:
        if self._fault:  # another thread of this rank may have found it
            raise RuntimeError(self._fault)
        ranks = list(ranks)
        deadline = time.monotonic() + self.timeout
        began = time.perf_counter()
        for rank in ranks:
            while not self._flags[rank].wait(flag, number + 1, SLICE_SECONDS):
                self._check_others(ranks, lambda other: self._flags[other].wait(flag, number + 1, 0.0), number)
                if time.monotonic() > deadline:
                    self._fail_late(rank, number)
            began, before = time.perf_counter(), began
            if rank != self.rank:
                self.waited[rank] += began - before
        return ranks

    def _check_others(self, ranks: Sequence[int], has_come: Callable[[int], bool], number: int) -> None:
        # The order matters: lock, flags, fault. So the flags and the fault that a rank wrote before it died count.
        gone = [rank for rank in ranks if rank != self.rank and not memory.is_held(self._descriptors[rank])]
        gone = [rank for rank in gone if not has_come(rank)]
        self._check_faults()
        if gone:
            self.fail(self._gone(gone[0], number))

    def check_present(self, rank: int, when: str) -> None:
        """Raise RuntimeError if a rank is gone, or any rank has failed. It does not wait."""
        if self._fault:
            raise RuntimeError(self._fault)
        is_gone = rank != self.rank and not memory.is_held(self._descriptors[rank])
        self._check_faults()
        if is_gone:
            self.fail(f"rank {rank} is gone (it died or left) {when}")

    def _check_faults(self) -> None:
        for rank in self.others:
            if self._flags[rank].read(FAULT):
                self.fail(_read(self._controls[rank], _WHY).decode(errors="replace"))

    def _fail_late(self, rank: int, number: int) -> NoReturn:
        self.fail(
            f"rank {rank} did not arrive within {self.timeout:g} s at operation {number}, "
            f"{self._text(self.rank, number)}: it may be slower, or train other parameters in this step, or not make "
            "this call, such as evaluation_model()"
        )

    def _gone(self, rank: int, number: int) -> str:
        what = self._text(self.rank, number)
        return f"rank {rank} is gone (it died or left) before the end of operation {number}, {what}"

    def fail(self, why: str) -> NoReturn:
        """Raise here, and on every other rank when it waits next."""
        self._fault = why
        _write(self._own, _WHY, why.encode(), _TEXTS - _WHY)
        self._flags[self.rank].post(FAULT, 1)
        raise RuntimeError(why)


def _write(control: mmap.mmap, offset: int, content: bytes, num_bytes: int) -> None:
    content = content[: num_bytes - 2]
    control[offset : offset + 2 + len(content)] = len(content).to_bytes(2, "little") + content


def _read(control: mmap.mmap, offset: int) -> bytes:
    length = int.from_bytes(control[offset : offset + 2], "little")
    return control[offset + 2 : offset + 2 + length]
