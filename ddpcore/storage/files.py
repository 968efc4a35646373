"""Files: what a stranger's may ask for before it is refused, how its name is shown, writes that are atomic, and locks.

All limits are here. Each is the default of an argument or a flag, which the error names.
"""

import fcntl
import gzip
import hashlib
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
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

LOCK = ".lock"  # an empty file in a locked folder; it is not removed


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


def read_file(path: Path, max_bytes: int | None = None, limit: str = "ddpcore.storage.files.TEXT_BYTES") -> bytes:
    """The content of a regular file that has at most so many bytes. ``limit`` is the name of this bound for the user.

    Without a bound it is a text, with the bound TEXT_BYTES. ValueError: it is no regular file, or it is larger; nothing
    has been read then. OSError: it cannot be read.
    """
    with open_file(path) as file:
        check_bytes(path, os.fstat(file.fileno()).st_size, TEXT_BYTES if max_bytes is None else max_bytes, limit)
        return file.read()


def sha256_of(file: BinaryIO) -> str:
    """The SHA-256 of a file from where it is read next, as ``sha256sum`` writes it."""
    found = hashlib.sha256()
    while part := file.read(MiB):
        found.update(part)
    return found.hexdigest()


def check_bytes(path: Path, num_bytes: int, max_bytes: int, limit: str, what: str = "it has") -> None:
    """Raise ValueError if a file takes more than ``max_bytes``, a bound that the user knows by the name ``limit``."""
    if num_bytes > max_bytes:
        advice = f"more than {max_bytes:,}: raise {limit} if you trust the file"
        raise ValueError(f"{shown(path)}: {what} {num_bytes:,} bytes, {advice}")


def find_packed(path: Path) -> Path | None:
    """The file, else its ``.gz``, else None."""
    return next((found for found in (path, path.with_name(path.name + ".gz")) if found.exists()), None)


def read_packed(path: Path, advice: str, max_bytes: int) -> tuple[Path, bytes]:
    """Path and content of a file or, if there is none, of its ``.gz``, unpacked.

    ValueError if both are missing (the message ends with the advice), or the file is unreadable, no regular file, a
    corrupt gzip, or has more than ``max_bytes``, unpacked; no more than that is ever unpacked.
    """
    if (found := find_packed(path)) is None:
        raise ValueError(f"{shown(path)}: no such file, nor its .gz, {advice}")
    try:
        stored = read_file(found, max_bytes, DATA_LIMIT)
        return found, stored if found == path else _unpack(found, stored, max_bytes)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{shown(found)}: corrupt gzip ({error}), fetch it again") from error
    except OSError as error:
        raise ValueError(f"{shown(found)}: cannot be read ({error.strerror}), make it a readable file") from error


def _unpack(path: Path, stored: bytes, max_bytes: int) -> bytes:
    """A small file can unpack to a thousand times its size, so this goes piece by piece."""
    unpacked = bytearray()
    with gzip.GzipFile(fileobj=io.BytesIO(stored)) as file:
        while piece := file.read(MiB):
            unpacked += piece
            check_bytes(path, len(unpacked), max_bytes, DATA_LIMIT, "it unpacks to at least")
    return bytes(unpacked)


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
