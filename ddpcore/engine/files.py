"""Files that are whole or not there, also after a crash."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """All of it or nothing: a reader never meets half a file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_file(partial, content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


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
