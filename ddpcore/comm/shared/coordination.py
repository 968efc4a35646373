"""Where the ranks of one host meet: who is how far, who is gone, and what went wrong.

Every rank calls the same operations in the same order, so an operation has the same number everywhere. A rank owns a
control segment: two counters that it alone posts and all others read, the texts of its latest operations, and room for
a fault.

``arrived``: what this rank gives to operation i, and all before, may be read once the counter is above i.
``finished``: this rank needs nothing more of operation i, and has written all its share of it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch.distributed as dist

from ddpcore.comm.shared import memory
from ddpcore.comm.shared.flags import LINE_BYTES, Flags

ARRIVED, FINISHED, FAULT = 0, 1, 2  # flags, a line each
_TOKEN, _HANDLE, _WHY, _TEXTS = 3 * LINE_BYTES, 256, 1280, 2048  # offsets
_TEXT_BYTES, NUM_TEXTS = 128, 512
_CONTROL_BYTES = _TEXTS + _TEXT_BYTES * NUM_TEXTS
SLICE_SECONDS = 0.2  # of waiting, after which a rank looks whether the others live
DYING_SECONDS = 2.0  # between the first file that a dying process lost and its lock


class Unreachable(ValueError):
    """The ranks of a group do not reach each other's memory; on every rank alike."""


class _ControlAddress(NamedTuple):
    host: str
    pid: int
    descriptor: int
    token: bytes


def host_id() -> str:
    """The same in all processes of a running machine, and in no other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class Coordinator:
    """The ranks of a group that share a host. Making one is collective.

    Args:
        group: an initialised process group; used here only.
        timeout: seconds that a rank which lives may let the others wait.

    Raises:
        Unreachable: on every rank alike; they are not all on one host, or cannot reach each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self._descriptors: dict[int, int] = {}  # of the control files, by rank
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        self.timeout = timeout
        self.num_operations = 0
        self._fault = ""
        token = secrets.token_bytes(16)
        why, place = "", _ControlAddress(host_id(), os.getpid(), -1, token)
        try:
            place = self._create(place)
        except (OSError, AttributeError, ImportError) as error:  # AttributeError: no memfd_create on this system
            why = f"rank {self.rank} cannot make shared memory ({error})"
        places = _gather(group, place)
        hosts = {other.host for other in places}
        if len(hosts) > 1 and not why:
            why = f"the {self.num_ranks} ranks are on {len(hosts)} hosts"
        self.pids = [other.pid for other in places]
        self._controls: list[mmap.mmap] = []
        try:
            if not why:
                self._controls = [self._open(rank, other) for rank, other in enumerate(places)]
                self._flags = [Flags(control) for control in self._controls]
        except OSError as error:
            why = f"rank {self.rank} cannot open the memory of another ({error})"
        reasons = [reason for reason in _gather(group, why) if reason]
        if reasons:
            self.close()
            raise Unreachable(f"shared memory does not connect these ranks: {reasons[0]}: use --transport pg")

    def _create(self, place: _ControlAddress) -> _ControlAddress:
        descriptor = memory.create_file(_CONTROL_BYTES)
        self._descriptors[self.rank] = descriptor
        self._own = mmap.mmap(descriptor, _CONTROL_BYTES)
        self._own[_TOKEN : _TOKEN + len(place.token)] = place.token
        memory.hold(descriptor)
        return place._replace(descriptor=descriptor)

    def _open(self, rank: int, place: _ControlAddress) -> mmap.mmap:
        if rank == self.rank:
            return self._own
        descriptor = memory.open_file(place.pid, place.descriptor)
        self._descriptors[rank] = descriptor
        control = mmap.mmap(descriptor, _CONTROL_BYTES)
        if control[_TOKEN : _TOKEN + len(place.token)] != place.token:  # another process has that id here
            raise OSError(f"process {place.pid} is not rank {rank}: another container?")
        return control

    def close(self) -> None:
        """Leave: the others see this rank as gone."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __del__(self) -> None:
        self.close()

    # --- operations ----------------------------------------------------------------------------------------------

    def arrive(self, text: str, handle: bytes = b"") -> int:
        """Come to the next operation, which ``text`` describes to all alike; returns its number."""
        if self._fault:
            raise RuntimeError(self._fault)
        number = self.num_operations
        self.num_operations += 1
        _write(self._own, _TEXTS + number % NUM_TEXTS * _TEXT_BYTES, text.encode(), _TEXT_BYTES)
        if handle:
            _write(self._own, _HANDLE, handle, _WHY - _HANDLE)
        self._flags[self.rank].post(ARRIVED, number + 1)
        return number

    def have_arrived(self, number: int) -> bool:
        """Whether all ranks have come to this operation."""
        return all(flags.wait(ARRIVED, number + 1, 0.0) for flags in self._flags)

    def await_arrived(self, ranks: Iterable[int], number: int) -> None:
        """Return when these ranks have come to this operation, and to the same as this rank.

        Raises:
            RuntimeError: one is gone, does not come, or calls something else; it names the rank and the operation.
        """
        mine = self._text(self.rank, number)
        arrived = self._wait(ranks, ARRIVED, number)
        if self.num_operations - number > NUM_TEXTS // 2:
            return  # an exchange, so long ago that its texts may be gone: others have been compared since
        for rank in arrived:
            theirs = self._text(rank, number)
            if theirs != mine:
                self._fail(
                    f"rank {rank} came to operation {number} with {theirs}, rank {self.rank} with {mine}: all ranks "
                    "must call the same in the same order"
                )

    def finish(self, number: int) -> None:
        """Say that this rank is through with this operation and with all before."""
        self._flags[self.rank].post(FINISHED, number + 1)

    def await_passed(self, ranks: Iterable[int], number: int) -> None:
        """Return when these ranks have come as far as this operation, whatever they came with."""
        self._wait(ranks, ARRIVED, number)

    def await_finished(self, number: int, ranks: Iterable[int] | None = None) -> None:
        """Return when these ranks, or all, are through with this operation."""
        self._wait(self.others if ranks is None else ranks, FINISHED, number)

    def handle_of(self, rank: int) -> bytes:
        """What a rank last gave to ``arrive``."""
        return _read(self._controls[rank], _HANDLE)

    def lose(self, rank: int, number: int, error: Exception) -> NoReturn:
        """Raise, on all ranks: what a rank gave to an operation cannot be reached, as a rule because it is gone."""
        deadline = time.monotonic() + DYING_SECONDS
        while memory.is_held(self._descriptors[rank]):  # a process that is being killed loses file after file
            if time.monotonic() > deadline:
                self._fail(f"rank {rank} cannot be read by rank {self.rank} ({error})")
            time.sleep(0.01)
        self._fail(self._gone(rank, number))

    # --- waiting and faults --------------------------------------------------------------------------------------

    def _text(self, rank: int, number: int) -> str:
        return _read(self._controls[rank], _TEXTS + number % NUM_TEXTS * _TEXT_BYTES).decode()

    def _wait(self, ranks: Iterable[int], flag: int, number: int) -> Sequence[int]:
        ranks = list(ranks)
        deadline = time.monotonic() + self.timeout
        for rank in ranks:
            while not self._flags[rank].wait(flag, number + 1, SLICE_SECONDS):
                self._look_round(ranks, lambda other: self._flags[other].wait(flag, number + 1, 0.0), number)
                if time.monotonic() > deadline:
                    self._fail(
                        f"rank {rank} did not arrive within {self.timeout:g} s at operation {number}, "
                        f"{self._text(self.rank, number)}"
                    )
        return ranks

    def _look_round(self, ranks: Sequence[int], has_come: Callable[[int], bool], number: int) -> None:
        # In this order, so that what a rank did before it died is seen: its life, its flags, its fault.
        gone = [rank for rank in ranks if rank != self.rank and not memory.is_held(self._descriptors[rank])]
        gone = [rank for rank in gone if not has_come(rank)]
        for rank in self.others:
            if self._flags[rank].read(FAULT):
                self._fail(_read(self._controls[rank], _WHY).decode(errors="replace"))
        if gone:
            self._fail(self._gone(gone[0], number))

    def _gone(self, rank: int, number: int) -> str:
        what = self._text(self.rank, number)
        return f"rank {rank} is gone (it died or left) before the end of operation {number}, {what}"

    def _fail(self, why: str) -> NoReturn:
        """Raise, here and, when they next wait, on all other ranks."""
        self._fault = why
        _write(self._own, _WHY, why.encode(), _TEXTS - _WHY)
        self._flags[self.rank].post(FAULT, 1)
        raise RuntimeError(why)


def _gather(group: dist.ProcessGroup, value: object) -> list:
    values: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _write(control: mmap.mmap, offset: int, content: bytes, num_bytes: int) -> None:
    content = content[: num_bytes - 2]
    control[offset : offset + 2 + len(content)] = len(content).to_bytes(2, "little") + content


def _read(control: mmap.mmap, offset: int) -> bytes:
    length = int.from_bytes(control[offset : offset + 2], "little")
    return control[offset + 2 : offset + 2 + length]
