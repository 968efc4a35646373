"""Files from strangers: what one may ask for before it is refused, and how its name is shown.

All limits are here. Each is the default of an argument or a flag, which the error names.
"""

from __future__ import annotations

import os
import stat
from os import PathLike, fspath
from pathlib import Path
from typing import BinaryIO

MiB, GiB = 2**20, 2**30

DATA_LIMIT = "data.max_bytes"
# Memory that one file of a data set may take, unpacked: the option max_bytes of these data sets.
MNIST_BYTES = 64 * MiB  # the largest of the canonical files has 45 MiB
CIFAR_BYTES = 256 * MiB  # 148 MiB
FEATURES_BYTES = 4 * GiB  # of all files of the folders train and test together
# A text that is parsed as a whole: the argument max_bytes of what reads it. Parsed, JSON takes up to 20 times as much.
STUDY_BYTES = MiB // 4  # the largest study of ddpcore has 39 KiB
TEXT_BYTES = 16 * MiB
SURFACE_BYTES = 64 * MiB  # of the HDF5 file of a landscape
TREE_BYTES = 256 * MiB  # of one rank's state in a checkpoint, without its tensors
# Runs of one command of ddpcore.experiments: --max-runs.
NUM_RUNS = 10_000


def shown(name: str | PathLike[str]) -> str:
    """A name for a message: as it is, or in quotes with escapes if a character is not printable.

    So a name cannot add lines, move the cursor or change colours.
    """
    text = fspath(name)
    return text if text.isprintable() else repr(text)


def plain(text: str) -> str:
    """The text with every character that is not printable as an escape, such as ``\\x1b`` or ``\\n``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. ValueError for a FIFO, a device or a folder: reading it could take forever."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # to open a FIFO must not wait for its writer
    except ValueError:  # a NUL in the name
        raise FileNotFoundError(2, os.strerror(2), str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{shown(path)}: cannot be read (a folder, a FIFO or a device), name a file")
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, max_bytes: int | None = None, limit: str = "ddpcore.storage.limits.TEXT_BYTES") -> bytes:
    """The content of a regular file that has at most so many bytes. ``limit`` is the name of this bound for the user.

    Without a bound it is a text, with the bound TEXT_BYTES. ValueError: it is no regular file, or it is larger; nothing
    has been read then. OSError: it cannot be read.
    """
    with open_file(path) as file:
        check_bytes(path, os.fstat(file.fileno()).st_size, TEXT_BYTES if max_bytes is None else max_bytes, limit)
        return file.read()


def check_bytes(path: Path, num_bytes: int, max_bytes: int, limit: str, what: str = "it has") -> None:
    """Raise ValueError if a file takes more than ``max_bytes``, a bound that the user knows by the name ``limit``."""
    if num_bytes > max_bytes:
        advice = f"more than {max_bytes:,}: raise {limit} if you trust the file"
        raise ValueError(f"{shown(path)}: {what} {num_bytes:,} bytes, {advice}")
