"""Memory that the processes of one host share, without a name: it is gone with the last process that maps it.

``memfd_create`` and not ``shm_open``: a file that never had a name cannot be left behind, whenever its ranks are
killed, nobody can guess it, and the size of ``/dev/shm`` (64 MB in many containers) does not limit it. Others open it
as ``/proc/<pid>/fd/<number>``, which the kernel grants to the same user alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref
from typing import Protocol

import torch
from torch import Tensor

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # madvise(2), Linux 5.14


class Memory(Protocol):
    """Where buffers lie that all ranks of a host reach, and what makes a write visible to them."""

    def allocate(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """Zeros ``[num_bytes]`` uint8, and what the others open them with."""

    def open(self, pid: int, handle: bytes, num_bytes: int) -> Tensor:
        """The buffer of another process.

        Raises:
            OSError: it cannot be reached.
        """

    def publish(self) -> None:
        """Before a flag is posted: what was written so far comes with it."""

    def follow(self, rank: int) -> None:
        """After a flag of this rank was seen: what comes next sees what the rank wrote."""


def create_file(num_bytes: int) -> int:
    """A nameless file in memory, of zeros, for this user alone; its descriptor."""
    descriptor = os.memfd_create("ddpcore", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def map_file(descriptor: int, num_bytes: int, *, ours: bool) -> mmap.mmap:
    """Map a file for reading and writing, with its pages: the owner's first touch puts them near its core."""
    mapped = mmap.mmap(descriptor, num_bytes)
    with contextlib.suppress(OSError):  # an older kernel: pages come when they are touched
        mapped.madvise(_POPULATE_WRITE if ours else _POPULATE_READ)
    return mapped


def open_file(pid: int, descriptor: int) -> int:
    """The file of another process, by the number that it has there.

    Raises:
        OSError: no such process or file here, or not of this user.
    """
    return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def hold(descriptor: int) -> None:
    """Lock a file of one's own for as long as this process lives.

    A POSIX lock: the kernel releases it when the process dies, before anybody waits for it, so a zombie counts as dead;
    and children of a fork (data loaders) do not hold it. It ends with the first close of the file in this process.
    """
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(descriptor: int) -> bool:
    """Whether the process that locked this file lives."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.lockf(descriptor, fcntl.LOCK_UN)
    return False


class HostMemory:
    """Memory of the CPU. Stores become visible in order, and a flag is released and acquired, so nothing is to do."""

    def allocate(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """See :class:`Memory`."""
        descriptor = create_file(num_bytes)
        mapped = map_file(descriptor, num_bytes, ours=True)
        weakref.finalize(mapped, os.close, descriptor)
        return torch.frombuffer(mapped, dtype=torch.uint8), str(descriptor).encode()

    def open(self, pid: int, handle: bytes, num_bytes: int) -> Tensor:
        """See :class:`Memory`."""
        descriptor = open_file(pid, int(handle))
        try:
            return torch.frombuffer(map_file(descriptor, num_bytes, ours=False), dtype=torch.uint8)
        finally:
            os.close(descriptor)

    def publish(self) -> None:
        """Nothing."""

    def follow(self, rank: int) -> None:
        """Nothing."""
