"""Writes of files that are atomic also in a crash, and locks of folders."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddpcore.storage.limits import shown

LOCK = ".lock"  # an empty file in a locked folder; it is not removed


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the old content or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_file(partial, content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """In the ``with`` block, this process holds the lock of a folder, which is made if it is missing.

    The system releases the lock when the process ends, also after a crash. ValueError if another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{shown(folder)}: another process works in it: wait, or take another folder") from None
        yield
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write a file and return once it is on the disk. OSError names the file, also if the disk is full."""
    try:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno is None:  # not of the system
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(folder: Path) -> None:
    """Return once new and changed names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
