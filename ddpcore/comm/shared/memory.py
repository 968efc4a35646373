"""Memory that the processes of one host share. It has no name, and is freed with the last process that maps it.

It is made by ``memfd_create``, not by ``shm_open``: a file without a name cannot remain after its processes are killed,
no process can guess it, and the size of ``/dev/shm`` (64 MB in many containers) does not limit it. Other processes open
it as ``/proc/<pid>/fd/<number>``, which the kernel allows only to the same user.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor
from typing_extensions import override

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # madvise(2), Linux 5.14


class Memory(ABC):
    """Buffers that all ranks of a host can read and write."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """Return zeros ``[num_bytes]`` uint8, and the handle with which other processes open them."""

    @abstractmethod
    def open(self, pid: int, handle: bytes, num_bytes: int) -> Tensor:
        """Return the buffer of another process. OSError: this process cannot reach it."""

    def publish(self) -> None:
        """Make all writes so far visible to other ranks. It is called before a flag is posted."""


def create_file(num_bytes: int) -> int:
    """Create a file of zeros in memory, without a name, that only this user may open. Returns its descriptor."""
    descriptor = os.memfd_create("ddpcore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(descriptor, 0o600)
    os.ftruncate(descriptor, num_bytes)  # sealed: after a process shrank it, the others would die of SIGBUS
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def map_file(descriptor: int, num_bytes: int, *, ours: bool) -> mmap.mmap:
    """Map a file for reading and writing, and touch its pages, so that they are on the NUMA node of the owner."""
    mapped = mmap.mmap(descriptor, num_bytes)
    with contextlib.suppress(OSError):  # older kernels: pages are allocated when they are used
        mapped.madvise(_POPULATE_WRITE if ours else _POPULATE_READ)
    return mapped


def open_file(pid: int, descriptor: int) -> int:
    """Open a file by its descriptor in another process. OSError: there is none, or it belongs to another user."""
    return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def hold(descriptor: int) -> None:
    """Lock a file of this process until the process ends or closes the file.

    It is a POSIX lock. The kernel releases it when the process dies, so a zombie counts as dead, and children of a fork
    (data loaders) do not hold it. The first close of the file in this process releases it too.
    """
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(descriptor: int) -> bool:
    """Whether the process that locked this file is alive."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.lockf(descriptor, fcntl.LOCK_UN)
    return False


_own: dict[int, weakref.ref[mmap.mmap]] = {}  # buffers of this process, by their descriptors
_fork = threading.local()  # ``copies`` of the fork under way: each buffer, its address, that of a copy, its descriptor
_library = ctypes.CDLL(None)
_library.mmap.restype = ctypes.c_void_p
_library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_WRITABLE, _FIXED, _NONE = mmap.PROT_READ | mmap.PROT_WRITE, 0x10, ctypes.c_void_p(-1).value  # from <sys/mman.h>


def _copy_own() -> None:
    """Before a fork: later writes of this process reach its pages, and the forked one must not read them."""
    _fork.copies = []
    known = _own.copy().items()  # another thread may allocate or free one meanwhile
    for mapped, descriptor in [(mapped, one) for one, buffer in known if (mapped := buffer()) is not None]:
        there, size = ctypes.addressof(ctypes.c_char.from_buffer(mapped)), len(mapped)
        here = _library.mmap(None, size, _WRITABLE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if here != _NONE:
            ctypes.memmove(here, there, size)
        _fork.copies.append((mapped, there, here, descriptor))


def _forget(descriptor: int) -> None:
    del _own[descriptor]
    os.close(descriptor)


def _free_copies() -> None:
    for mapped, _, here, _ in _fork.__dict__.pop("copies", ()):
        if here != _NONE:
            _library.munmap(here, len(mapped))


def _make_private() -> None:
    """In a forked process: the copies take the place of the buffers. Without a copy its writes stay its own, too."""
    for mapped, there, here, descriptor in _fork.__dict__.pop("copies", ()):
        if here != _NONE:  # Linux alone has mremap
            _library.mremap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 2, ctypes.c_int, ctypes.c_void_p]
            _library.mremap(here, len(mapped), len(mapped), 3, there)  # MREMAP_MAYMOVE | MREMAP_FIXED
        else:
            _library.mmap(there, len(mapped), _WRITABLE, mmap.MAP_PRIVATE | _FIXED, descriptor, 0)


os.register_at_fork(before=_copy_own, after_in_parent=_free_copies, after_in_child=_make_private)


class HostMemory(Memory):
    """Memory of the CPU. Flags are posted with release and read with acquire, so :meth:`publish` has nothing to do."""

    @override
    def allocate(self, num_bytes: int) -> tuple[Tensor, bytes]:
        descriptor = create_file(num_bytes)
        mapped = map_file(descriptor, num_bytes, ours=True)
        _own[descriptor] = weakref.ref(mapped)
        weakref.finalize(mapped, _forget, descriptor)
        return torch.frombuffer(mapped, dtype=torch.uint8), str(descriptor).encode()

    @override
    def open(self, pid: int, handle: bytes, num_bytes: int) -> Tensor:
        descriptor = open_file(pid, int(handle))
        try:
            return torch.frombuffer(map_file(descriptor, num_bytes, ours=False), dtype=torch.uint8)
        finally:
            os.close(descriptor)


class Buffers:
    """Buffers that every rank has allocated, while this rank's own are in use."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: dict[int, tuple[range, dict[int, Tensor]]] = {}  # addresses of own bytes, others' bytes by rank
        self._numbers = count()

    def add(self, own: Tensor, views: Mapping[int, Tensor]) -> None:
        """Add this rank's buffer as bytes, with all ranks' buffers. Others' views are kept until ``own`` is freed."""
        number = next(self._numbers)
        others = {rank: view for rank, view in views.items() if rank != self._rank}
        self._known[number] = range(own.data_ptr(), own.data_ptr() + own.nbytes), others
        weakref.finalize(own.untyped_storage(), self._known.pop, number, None).atexit = False

    def find(self, rows: Tensor) -> tuple[str, dict[int, Tensor]] | None:
        """Return the place of a row ``[1, x]`` in a buffer, as text, and the same columns of all ranks; else None."""
        first, num_bytes = rows.data_ptr(), rows.nbytes
        for number, (place, views) in tuple(self._known.items()):  # another thread may free a buffer meanwhile
            start = first - place.start
            if start >= 0 and start + num_bytes <= len(place) and num_bytes > 0:
                columns = {rank: view[start : start + num_bytes].view(rows.dtype) for rank, view in views.items()}
                return f"at byte {start} of buffer {number}", {**columns, self._rank: rows[0]}
        return None


@dataclass
class Slot:
    """A buffer on each rank for rows that others read."""

    views: Mapping[int, Tensor]  # of each rank; one that died while it was made is missing
    readers: Sequence[int] = ()  # of this rank's row
    used: int | None = -1  # this rank has read its rows before this operation; None while an exchange is in progress


class Slots:
    """Buffers that exchanges use in turn. All ranks take the same, because numbers of operations decide."""

    def __init__(self) -> None:
        self.known: dict[Hashable, list[Slot]] = {}  # by their kind; slots of one kind have one size
        self._handed_out: list[Slot] = []

    def take(
        self, kind: Hashable, now: int, make: Callable[[int], list[Slot]], await_passed: Callable[..., None]
    ) -> Slot:
        """Return a slot of a kind that no rank reads, and mark it as in progress. ``now`` is the next operation.

        Without a free slot all ranks ``make`` so many new ones. ``await_passed`` waits until readers have begun an
        operation of that number.
        """
        known = self.known.setdefault(kind, [])
        # A slot whose readers end in this very operation is not free: they and this rank would wait for each other.
        if not (free := [slot for slot in known if slot.used is not None and slot.used < now]):
            free = make(1 if known else 2)
            known += free
        slot = min(free, key=lambda one: one.used or 0)
        if slot.used is not None and slot.used >= 0:
            await_passed(slot.readers, slot.used)
        slot.used = None
        return slot

    def hand_out(self, slot: Slot) -> None:
        """Note that the caller may read the rows until the next exchange begins."""
        self._handed_out.append(slot)

    def note_used(self, now: int) -> None:
        """At the begin of an exchange: what was handed out has been read before the operation ``now``."""
        for slot in self._handed_out:
            slot.used = now
        self._handed_out.clear()
