"""Files of a data set: plain or gzipped, with one-line errors."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path

from ddpcore.storage.limits import DATA_LIMIT, MiB, check_bytes, read_file, shown


def find(path: Path) -> Path | None:
    """The file, else its ``.gz``, else None."""
    return next((found for found in (path, path.with_name(path.name + ".gz")) if found.exists()), None)


def read(path: Path, advice: str, max_bytes: int) -> tuple[Path, bytes]:
    """Path and content of a file or, if there is none, of its ``.gz``, unpacked.

    ValueError if both are missing (the message ends with the advice), or the file is unreadable, no regular file, a
    corrupt gzip, or has more than ``max_bytes``, unpacked; no more than that is ever unpacked.
    """
    if (found := find(path)) is None:
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
