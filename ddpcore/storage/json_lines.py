"""Values as JSON, without NaN, and files with one JSON object a line: each line has a checksum.

The last entry of a line, ``"checksum": "..."``, is the CRC-32 of the line without it. So a line that was changed is
found, and the other lines are read. In files of version 0.2, ``"OWN-BEFORE"`` is the CRC-32 of BEFORE and the line.
Files of older versions, without checksums, are read too.
"""

import fcntl
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from typing_extensions import Self

from ddpcore.storage.files import read_file, replace_file, shown


def to_json(obj: Any) -> Any:
    """The value as dict, list, str, int, float, bool and None; NaN and infinity become None.

    Takes dataclasses (as a dict of their fields), mappings, sequences, sets (sorted), paths, tensors and numpy
    arrays or scalars. TypeError for anything else. ValueError: two keys are the same text.
    """
    if obj is None or isinstance(obj, bool | int | str):
        return obj
    if isinstance(obj, float):
        return float(obj) if math.isfinite(obj) else None
    if is_dataclass(obj) and not isinstance(obj, type):
        return {entry.name: to_json(getattr(obj, entry.name)) for entry in fields(obj)}
    if isinstance(obj, Mapping):
        if len(texts := {str(key): to_json(value) for key, value in obj.items()}) < len(obj):
            raise ValueError(f"two keys of {', '.join(map(repr, obj))[:80]} are the same text: give others")
        return texts
    if isinstance(obj, list | tuple):
        return [to_json(value) for value in obj]
    if isinstance(obj, set | frozenset):
        return [to_json(value) for value in sorted(obj)]
    if hasattr(obj, "tolist"):  # of torch and numpy
        return to_json(obj.tolist())
    if isinstance(obj, PathLike):
        return fspath(obj)
    raise TypeError(f"cannot write a {type(obj).__name__} as JSON: give numbers, text, lists, mappings or dataclasses")


_TAIL = re.compile(rb', "checksum": "([0-9a-f]{8})(?:-([0-9a-f]{8}))?"\}$')
_ALMOST = re.compile(rb', "checksum": |"[0-9a-f]{8}(-[0-9a-f]{8})?"\}$')  # of a tail in which a byte was changed
_JSON_TAIL = re.compile(rb',?\n  "checksum": "([0-9a-f]{8})"\n\}\n$')
_JSON_ALMOST = re.compile(rb',\n  "checksum": |"[0-9a-f]{8}"\n\}\n$')


class JsonLines:
    """A file to which JSON lines are appended; its folder is made if it is missing.

    Each line is one system call that writes at the end of the file. So a reader never sees half a line, and several
    processes may append to one file, each in turn.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab+", buffering=0)

    def append(self, row: Any) -> None:
        """Write a row as one line: a mapping or a dataclass of values that `to_json` accepts.

        A last line that was cut is ended first, so that it costs no other line. OSError, which names the file: the line
        could not be written whole, and nothing of it is left.
        """
        line = _line_of(row)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            status = os.fstat(self._file.fileno())
            if not status.st_nlink:
                raise OSError(f"{shown(self.path)}: the file was removed, or its folder, so lines would be lost")
            last = os.pread(self._file.fileno(), 1, max(0, status.st_size - 1))
            line = line if last in (b"", b"\n") else b"\n" + line
            if self._file.write(line) != len(line):
                os.ftruncate(self._file.fileno(), status.st_size)
                raise OSError(f"{shown(self.path)}: a line could not be written whole, is the disk full?")
        except OSError as error:
            if error.errno is None:
                raise
            raise OSError(f"{shown(self.path)}: a line could not be written ({error.strerror})") from error
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def sync(self) -> None:
        """Return once all lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; it may be called twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass
class Lines:
    """What a file of JSON lines holds."""

    rows: list[dict[str, Any]] = field(default_factory=list)  #: of lines as they were written, without their checksums
    problems: list[str] = field(default_factory=list)  #: a sentence for each other line, with the file and its number


def read_lines(path: Path) -> Lines:
    """All lines of a file that are as they were written; none if there is no file. OSError: it cannot be read."""
    content = read_file(path) if path.is_file() else b""
    # splitlines() would also split at characters that JSON allows inside a text.
    texts = content.removesuffix(b"\n").split(b"\n") if content else []
    found, has_checksums = Lines(), False
    for number, text in enumerate(texts, start=1):
        tail = _TAIL.search(text)
        row = _parsed(text, tail, has_checksums)
        has_checksums |= tail is not None
        if isinstance(row, dict):
            found.rows.append(row)
            continue
        if number == len(texts) and not content.endswith(b"\n"):
            row = "is incomplete, as after a crash"
        found.problems.append(f"{shown(path)}: line {number} {row}")
    return found


def _parsed(text: bytes, tail: re.Match[bytes] | None, has_checksums: bool) -> dict[str, Any] | str:
    """The object of a line, or what is wrong. ``has_checksums``: a line before it has one."""
    if tail is None and (has_checksums or _ALMOST.search(text)):
        return "is damaged: it has no checksum, or a changed one"
    body = text if tail is None else text[: tail.start()] + b"}"
    if tail is not None and _checksum((tail[2] or b"") + body) != tail[1].decode():
        return "is damaged: it does not match its checksum"
    try:
        row = json.loads(body)
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, or thousands of brackets
        row = None
    if not isinstance(row, dict):
        return "is no JSON object: the file is damaged"
    if not isinstance(row.get("config", {}), dict):
        return f"has config {row['config']!r}: the file is damaged"
    return row


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    """Write a file of rows, atomically, see :meth:`JsonLines.append`."""
    replace_file(path, b"".join(map(_line_of, rows)))


def mend(path: Path, warn: Callable[[str], None]) -> None:
    """Remove damaged lines from a file, so that it can be continued; ``warn`` is called with a sentence for each."""
    lines = read_lines(path)
    for problem in lines.problems:
        warn(f"{problem}: the rest is kept")
    if lines.problems:
        write_lines(path, lines.rows)


def _line_of(row: Any) -> bytes:
    body = json.dumps(to_json(row), allow_nan=False).encode()
    return body[:-1] + f', "checksum": "{_checksum(body)}"}}\n'.encode()


def _checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write one object as an indented JSON file with a checksum, atomically. :func:`read_json` reads it."""
    body = json.dumps(to_json(result), indent=2, allow_nan=False).encode() if result else b"{\n}"
    comma = "," if result else ""
    replace_file(path, body[:-2] + f'{comma}\n  "checksum": "{_checksum(body)}"\n}}\n'.encode())


def read_json(path: Path) -> Any:
    """The value of a JSON file. Files without a checksum, such as files of older versions, are read too.

    ValueError, without the name of the file: it is no JSON, or does not match its checksum. OSError: it cannot be read.
    """
    content = read_file(path)
    if (found := _JSON_TAIL.search(content)) is not None:
        content = content[: found.start()] + b"\n}"
    if _checksum(content) != found[1].decode() if found is not None else _JSON_ALMOST.search(content):
        raise ValueError("it does not match its checksum: if you have edited it, remove its last entry, checksum")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it has too many brackets") from None
