"""Files that are whole or not there, also after a crash."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".lock"  # of a folder, a file that says nothing and stays


def replace_file(path: Path, content: bytes) -> None:
    """All of it or nothing: a reader never meets half a file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_file(partial, content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside, no other process that asks for the same has the folder; it is made if it is missing.

    The lock goes with the process, however that ends.

    Raises:
        ValueError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another process is at work in it: wait, or take another folder") from None
        yield
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Returns once it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """A name, new or changed, is on the disk once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
