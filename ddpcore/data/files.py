"""Reading the files of a data set: plain or gzipped, known or not, and one line where that fails."""

from __future__ import annotations

import gzip
import hashlib
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class File(NamedTuple):
    """What was read: where from, the content, and the bytes as they lie there, packed or not."""

    path: Path
    content: bytes
    stored: bytes


def find(path: Path) -> Path | None:
    """The file, or its .gz where there is no other; None where there is neither."""
    return next((found for found in (path, path.with_name(path.name + ".gz")) if found.exists()), None)


def read(path: Path, advice: str) -> File:
    """A file, or its .gz unpacked; the plain file wins.

    ValueError, ending with the advice where there is no file, if it is missing, unreadable or a corrupt gzip.
    """
    found = find(path)
    if found is None:
        raise ValueError(f"{path}: no such file, nor its .gz, {advice}")
    try:
        stored = found.read_bytes()
        return File(found, stored if found == path else gzip.decompress(stored), stored)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{found}: corrupt gzip ({error}), fetch it again") from error
    except OSError as error:
        raise ValueError(f"{found}: cannot be read ({error.strerror}), make it a readable file") from error


def compare(file: File, md5: Mapping[str, str]) -> None:
    """Warn, with both sums, if a file, once it made sense, is not the canonical one of its name."""
    expected = md5.get(file.path.name)
    if expected is None:
        return
    actual = hashlib.md5(file.stored, usedforsecurity=False).hexdigest()
    if actual != expected:
        text = f"{file.path}: MD5 {actual} is not {expected}, the canonical file's: using it all the same"
        warnings.warn(text, stacklevel=2)
