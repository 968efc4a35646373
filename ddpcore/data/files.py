"""Reading the files of a data set: plain or gzipped, known or not, and one line where that fails."""

from __future__ import annotations

import gzip
import hashlib
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path


def read(path: Path, md5: Mapping[str, str], advice: str) -> tuple[Path, bytes]:
    """The content of a file, or of its .gz unpacked, and the path it came from; the plain file wins.

    md5 has canonical checksums by file name: another content is a warning with both sums, and is read all the same.
    ValueError, ending with the advice where there is no file, if it is missing, unreadable or a corrupt gzip.
    """
    packed = path.with_name(path.name + ".gz")
    found = path if path.exists() else packed
    if not found.exists():
        raise ValueError(f"{path}: no such file, nor its .gz, {advice}")
    try:
        content = found.read_bytes()
    except OSError as error:
        raise ValueError(f"{found}: cannot be read ({error.strerror}), make it a readable file") from error
    _compare(found, content, md5)
    if found == path:
        return path, content
    try:
        return packed, gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{packed}: corrupt gzip ({error}), fetch it again") from error


def _compare(path: Path, content: bytes, md5: Mapping[str, str]) -> None:
    expected = md5.get(path.name)
    if expected is None:
        return
    actual = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if actual != expected:
        warnings.warn(f"{path}: MD5 {actual} is not {expected}, the canonical file's: reading it anyway", stacklevel=5)
