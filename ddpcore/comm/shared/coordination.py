"""Coordination of the ranks of one host: progress counters, and the detection of dead ranks and of faults.

All ranks call the same operations in the same order, so an operation has the same number on every rank. Each rank owns
a control segment that the others can read: two counters, the texts of its latest operations, and a fault message.

``arrived``: once the counter is above i, other ranks may read this rank's data of operation i and all earlier ones.
``finished``: once the counter is above i, this rank has read all data of operation i and written its share of it.
"""

import ctypes
import mmap
import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch import Tensor

from ddpcore.comm.groups import CALL_ALIKE, gather_objects
from ddpcore.comm.shared import memory
from ddpcore.ops.library import LIBRARY_FILE, WHY_NOT_COMPILED

LINE_BYTES = 64  # each flag has its own cache line
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
        group: a process group, used only by the constructor; None for a rank that has no number before :meth:`join`.
        timeout: seconds that a living rank may let the others wait.
        ids: the number of each rank here; None: as in the group.
        among: the numbers of those ranks of the group that this rank coordinates with; None: all.

    Unreachable, on every rank: they are not on one host, or cannot reach each other's memory. OSError, without a group:
    there is no memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout: float,
        ids: Sequence[int] | None = None,
        among: Sequence[int] | None = None,
    ) -> None:
        self._descriptors: dict[int, int] = {}  # of the control files, by rank
        self._controls: dict[int, mmap.mmap] = {}
        self._flags: dict[int, Any] = {}
        self.pids: dict[int, int] = {}
        self.rank, self.timeout = -1, timeout
        self.others: list[int] = []
        self.num_operations = 0
        self.waited: dict[int, float] = {}  # seconds
        self._fault = ""
        self.address = ControlAddress(host_id(), os.getpid(), -1, secrets.token_bytes(16).hex())
        if group is None:
            self._create()
        else:
            ids = range(dist.get_world_size(group)) if ids is None else ids
            self._meet_group(group, ids, ids if among is None else among)

    def _meet_group(self, group: dist.ProcessGroup, ids: Sequence[int], among: Sequence[int]) -> None:
        self.rank = ids[dist.get_rank(group)]
        why = ""
        try:
            self._create()
        except (OSError, AttributeError) as error:  # AttributeError: no memfd_create on this system
            why = f"rank {self.rank} cannot make shared memory ({error})"
        addresses = gather_objects(group, self.address, "the set-up of shared memory", self.timeout)
        everyone = dict(zip(ids, addresses, strict=True))
        known = {rank: everyone[rank] for rank in among}
        hosts = {other.host for other in known.values()}
        if len(hosts) > 1 and not why:
            why = f"the {len(known)} ranks are on {len(hosts)} hosts"
        try:
            if not why:
                self.meet(known)
        except (OSError, ImportError) as error:  # ImportError: no compiled library
            why = f"rank {self.rank} cannot open the memory of another ({error})"
        answers = gather_objects(group, why, "the set-up of shared memory", self.timeout)
        if reason := next(filter(None, answers), ""):
            self.close()
            raise Unreachable(f"shared memory does not connect these ranks: {reason}: use --transport pg")

    def join(self, rank: int, addresses: Mapping[int, ControlAddress], num_operations: int) -> None:
        """Become a rank, between two operations of the others. OSError: one of them cannot be reached."""
        self._descriptors[rank] = self._descriptors.pop(self.rank)
        self.rank, self.num_operations = rank, num_operations
        try:
            self.meet({**addresses, rank: self.address})
        except FileNotFoundError as error:
            raise OSError("a rank of the run died while this one joined: join again") from error

    def admit(self, rank: int, address: ControlAddress) -> None:
        """Meet a rank that joins. If it has died already, it never comes to an operation."""
        self._flags.pop(rank, None)  # of a rank that died, whose number is given again
        with suppress(OSError):
            self.meet({rank: address})

    def meet(self, addresses: Mapping[int, ControlAddress]) -> None:
        """Open the control segments of ranks. OSError: one cannot be reached."""
        for rank, address in addresses.items():
            self._controls[rank] = self._own if rank == self.rank else self._open(rank, address)
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

    __del__ = close

    # --- operations ----------------------------------------------------------------------------------------------

    def arrive(self, text: str, handle: bytes = b"") -> int:
        """Begin the next operation and return its number. ``text`` describes it and is equal on all ranks."""
        if self.address.pid != os.getpid():
            raise RuntimeError(f"this process was forked from rank {self.rank} and is no rank: call this on the rank")
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

    def await_arrived(self, ranks: Iterable[int], number: int, *, may_die: bool = False) -> list[int]:
        """Wait until these ranks have begun this operation, or with ``may_die`` are dead; check that it is the same.

        Returns those that have: the same on every rank that lives, see :mod:`ddpcore.comm.fabric`. RuntimeError: a rank
        is gone, does not arrive in time, or calls another operation. It names both.
        """
        come = self._wait(ranks, ARRIVED, number, may_die=may_die)
        self.check_same(come, number)
        return come

    def check_same(self, ranks: Iterable[int], number: int) -> None:
        """Raise RuntimeError, which names both, if one of these ranks has begun another operation of this number."""
        if self.num_operations - number > NUM_TEXTS // 2:
            return  # an old exchange, whose texts may be overwritten; the texts of later operations were compared
        mine = self._text(self.rank, number)
        for rank in ranks:
            if (theirs := self._text(rank, number)) != mine:
                what = f"rank {rank} came to operation {number} with {theirs}, rank {self.rank} with {mine}"
                self.fail(f"{what}: {CALL_ALIKE}")

    def finish(self, number: int) -> None:
        """Tell the others that this rank has finished this operation and all earlier ones."""
        self._flags[self.rank].post(FINISHED, number + 1)

    def await_passed(self, ranks: Iterable[int], number: int, *, may_die: bool = False) -> None:
        """Wait until these ranks have begun this operation, without a check that it is the same."""
        self._wait(ranks, ARRIVED, number, may_die=may_die)

    def await_finished(self, number: int, ranks: Iterable[int] | None = None, *, may_die: bool = False) -> None:
        """Wait until these ranks, or for None all, have finished this operation."""
        self._wait(self.others if ranks is None else ranks, FINISHED, number, may_die=may_die)

    def allocate(
        self, shared: memory.Memory, num_bytes: int, ranks: Sequence[int], *, may_die: bool = False
    ) -> dict[int, Tensor]:
        """Allocate ``num_bytes`` zeros, uint8, more than 0, on each of these ranks, and return them by rank, ascending.

        With ``may_die`` dead ranks are left out. Collective.
        """
        own, handle = shared.allocate(num_bytes)
        number = self.arrive(f"the allocation of {num_bytes} bytes", handle)
        views = {}
        for rank in self.await_arrived(ranks, number, may_die=may_die):
            try:
                is_own = rank == self.rank
                views[rank] = own if is_own else shared.open(self.pids[rank], self.handle_of(rank), num_bytes)
            except (OSError, ValueError) as error:  # the rank died after it arrived, so it begins no other operation
                if not may_die or self.is_alive(rank):
                    self.fail_to_read(rank, number, error)
        self.finish(number)
        self.await_finished(number, ranks, may_die=may_die)
        return views

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

    def _wait(self, ranks: Iterable[int], flag: int, number: int, *, may_die: bool = False) -> list[int]:
        """Wait for a flag of these ranks. Returns those that have set it: all, unless ranks may die."""
        if self._fault:  # another thread of this rank may have found it
            raise RuntimeError(self._fault)
        ranks, come = list(ranks), []
        deadline = time.monotonic() + self.timeout
        began = time.perf_counter()
        for rank in ranks:
            while not (has_come := self._has_come(rank, flag, number, SLICE_SECONDS)):
                if may_die and not (rank in self._flags and memory.is_held(self._descriptors[rank])):
                    has_come = self._has_come(rank, flag, number)  # it may have come just before it died
                    break
                self._check_others([] if may_die else ranks, flag, number)
                if time.monotonic() > deadline:
                    where = f"operation {number}, {self._text(self.rank, number)}"
                    late = f"rank {rank} did not arrive within {self.timeout:g} s at {where}"
                    why = "it may be slower, or train other parameters in this step"
                    self.fail(f"{late}: {why}, or not make this call, such as evaluation_model()")
            began, before = time.perf_counter(), began
            if has_come:
                come.append(rank)
            if rank != self.rank and rank in self.waited:
                self.waited[rank] += began - before
        return come

    def _has_come(self, rank: int, flag: int, number: int, seconds: float = 0.0) -> bool:
        return rank in self._flags and bool(self._flags[rank].wait(flag, number + 1, seconds))

    def _check_others(self, ranks: Sequence[int], flag: int, number: int) -> None:
        # The order matters: lock, flags, fault. So the flags and the fault that a rank wrote before it died count.
        gone = [rank for rank in ranks if rank != self.rank and not memory.is_held(self._descriptors[rank])]
        gone = [rank for rank in gone if not self._has_come(rank, flag, number)]
        self._check_faults()
        if gone:
            self.fail(self._gone(gone[0], number))

    def check_present(self, rank: int, when: str) -> None:
        """Raise RuntimeError if a rank is gone, or any rank has failed. It does not wait."""
        is_gone = rank != self.rank and not memory.is_held(self._descriptors[rank])
        self._check_faults()
        if is_gone:
            self.fail(f"rank {rank} is gone (it died or left) {when}")

    def _check_faults(self) -> None:
        if self._fault:  # another thread of this rank may have found it
            raise RuntimeError(self._fault)
        for rank in self.others:
            if self._flags[rank].read(FAULT):
                self.fail(_read(self._controls[rank], _WHY).decode(errors="replace"))

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
    return control[offset + 2 : offset + 2 + int.from_bytes(control[offset : offset + 2], "little")]


class Flags:
    """One flag in each 64 bytes of a buffer. The functions are in ``csrc/bindings/flags.cpp``.

    A flag is a 32-bit counter that grows and may wrap around. It has reached a target that is less than 2^31 below. The
    next 32 bits of its line count the processes that sleep until it grows. The buffer starts on a cache line.
    ImportError: there is no compiled library. TypeError: the buffer is read-only, or no buffer.
    """

    def __init__(self, buffer: Any) -> None:
        if WHY_NOT_COMPILED is not None:
            raise ImportError(f"shared memory needs compiled counters: {WHY_NOT_COMPILED}")
        num_bytes = memoryview(buffer).nbytes
        self._memory = (ctypes.c_char * num_bytes).from_buffer(buffer)  # keeps the buffer alive
        first = ctypes.addressof(self._memory)
        self._addresses = range(first, first + num_bytes - LINE_BYTES + 1, LINE_BYTES)

    def read(self, index: int) -> int:
        """The value of a flag."""
        return int(_flag_read(self._addresses[index]))

    def post(self, index: int, value: int) -> None:
        """Set a flag and wake those who wait for it. A process that reads the new value sees all earlier writes."""
        _post(self._addresses[index], value % 2**32)

    def wait(self, index: int, target: int, seconds: float) -> bool:
        """Return whether the flag reaches the target within that time. The GIL is free meanwhile."""
        flag = self._addresses[index]
        return (_flag_read(flag) - target) % 2**32 < 2**31 or bool(_wait(flag, target % 2**32, seconds))


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    found = getattr(library, name)
    found.restype, found.argtypes = result, arguments
    return found


if WHY_NOT_COMPILED is None:
    _quick = ctypes.PyDLL(str(LIBRARY_FILE))  # keeps the GIL: these calls take less time than to give it away
    _flag_read = _function(_quick, "ddpcore_flag_read", ctypes.c_uint32, ctypes.c_void_p)
    _post = _function(_quick, "ddpcore_flag_post", None, ctypes.c_void_p, ctypes.c_uint32)
    _slow = ctypes.CDLL(str(LIBRARY_FILE))  # releases the GIL
    _wait = _function(_slow, "ddpcore_flag_wait", ctypes.c_bool, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_double)
