"""Values as JSON, without NaN, and files with one JSON object a line: each line has a checksum.

A line ends with ``"checksum": "OWN-BEFORE"``: the CRC-32 of BEFORE and the line, and OWN of the line before it. So a
line that was changed, and one that is missing between two others, are found, and the other lines are read. Files of
older versions, without checksums, are read too.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddpcore.storage.files import replace_file
from ddpcore.storage.limits import read_file, shown


def json_number(x: float) -> float | None:
    """The number, or None for NaN and the infinities, which JSON does not have."""
    return x if math.isfinite(x) else None


def to_json(obj: Any) -> Any:
    """The value as dict, list, str, int, float, bool and None; NaN and infinity become None.

    Takes dataclasses (as a dict of their fields), mappings, sequences, sets (sorted), paths, tensors and numpy
    arrays or scalars. TypeError for anything else.
    """
    if obj is None or isinstance(obj, bool | int | str):
        return obj
    if isinstance(obj, float):
        return json_number(float(obj))
    if is_dataclass(obj) and not isinstance(obj, type):
        return {entry.name: to_json(getattr(obj, entry.name)) for entry in fields(obj)}
    if isinstance(obj, Mapping):
        return {str(key): to_json(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [to_json(value) for value in obj]
    if isinstance(obj, set | frozenset):
        return [to_json(value) for value in sorted(obj)]
    if isinstance(obj, torch.Tensor | np.ndarray | np.generic):
        return to_json(obj.tolist())
    if isinstance(obj, PathLike):
        return fspath(obj)
    raise TypeError(f"cannot write a {type(obj).__name__} as JSON: give numbers, text, lists, mappings or dataclasses")


_START = "00000000"  # OWN of what is before the first line
_TAIL = re.compile(rb', "checksum": "([0-9a-f]{8})-([0-9a-f]{8})"\}$')
_SEAM = re.compile(rb'(, "checksum": "[0-9a-f]{8}-[0-9a-f]{8}"\})[^\n](?=\{)')  # two lines whose line break was changed
_SHAPE = b', "checksum": "--------_--------"}'  # "-" stands for a digit of a checksum, "_" for the "-" between them


class JsonLines:
    """A file to which JSON lines are appended; its folder is made if it is missing.

    Each line is one system call that writes at the end of the file. So a reader never sees half a line, and several
    processes may append to one file, each in turn.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab+", buffering=0)
        self._before, self._end = _START, 0  # of the line that ends at byte `_end`

    def append(self, row: Any) -> None:
        """Write a row as one line: a mapping or a dataclass of values that `to_json` accepts.

        Raises:
            OSError: the line could not be written whole, and nothing of it is left; it names the file.
        """
        body = _body_of(row)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            self._follow()
            line, own = _line_of(body, self._before)
            written = self._file.write(line)
            if written != len(line):
                os.ftruncate(self._file.fileno(), self._end)
                raise OSError(f"{shown(self.path)}: a line could not be written whole, is the disk full?")
            self._before, self._end = own, self._end + len(line)
        except OSError as error:
            if error.errno is None:
                raise
            raise OSError(f"{shown(self.path)}: a line could not be written ({error.strerror})") from error
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _follow(self) -> None:
        """Take the checksum of the last line, if another process has written it. A line that was cut is ended."""
        status = os.fstat(self._file.fileno())
        if not status.st_nlink:
            raise OSError(f"{shown(self.path)}: the file was removed, or its folder, so lines would be lost")
        size = status.st_size
        if size == self._end:
            return
        tail = os.pread(self._file.fileno(), len(_SHAPE) + 1, max(0, size - len(_SHAPE) - 1))
        if tail and not tail.endswith(b"\n"):
            size += self._file.write(b"\n")
        found = _TAIL.search(tail.removesuffix(b"\n"))
        self._before, self._end = _START if found is None else found[1].decode(), size

    def sync(self) -> None:
        """Return once all lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; it may be called twice."""
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass
class Lines:
    """What a file of JSON lines holds.

    Attributes:
        rows: the objects of all lines that are as they were written, without their checksums.
        problems: a sentence for each line that is not, with the file and the number of the line.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class _Line:
    number: int
    row: dict[str, Any] | None  # None if the line is damaged
    problem: str = ""
    own: str = ""  # the checksums; empty if the line has none
    before: str = ""


def read_lines(path: Path) -> Lines:
    """All lines of a file, such as the record of a run, that are as they were written; none if there is no file.

    Raises:
        OSError: the file cannot be read.
    """
    content = read_file(path) if path.is_file() else b""
    texts = content.split(b"\n")  # splitlines() would also split at characters that JSON allows inside a text
    if not texts[-1]:
        texts.pop()
    lines: list[_Line] = []
    for number, text in enumerate(texts, start=1):
        line = _parsed(number, text)
        if line.row is None and len(parts := _SEAM.sub(rb"\1\n", text).split(b"\n")) > 1:
            lines += [_parsed(number, part) for part in parts]
            lines.append(_Line(number, None, "has a line break that was changed: both its lines were read"))
            continue
        if line.row is None and number == len(texts) and not content.endswith(b"\n"):
            line.problem = "is incomplete, as after a crash"
        lines.append(line)
    _check_chain(lines)
    return Lines(
        rows=[line.row for line in lines if line.row is not None],
        problems=[f"{shown(path)}: line {line.number} {line.problem}" for line in lines if line.problem],
    )


def _parsed(number: int, text: bytes) -> _Line:
    found = _TAIL.search(text)
    if found is None:
        if _is_like(text[-len(_SHAPE) :], _SHAPE):
            return _Line(number, None, "is damaged: its checksum was changed")
        body, own, before = text, "", ""
    else:
        body, own, before = text[: found.start()] + b"}", found[1].decode(), found[2].decode()
        if _checksum(before, body) != own:
            return _Line(number, None, "is damaged: it does not match its checksum", own, before)
    try:
        row = json.loads(body)
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, or thousands of brackets
        row = None
    if not isinstance(row, dict):
        return _Line(number, None, "is no JSON object: the file is damaged", own, before)
    if not isinstance(row.get("config", {}), dict):
        return _Line(number, None, f"has config {row['config']!r}: the file is damaged", own, before)
    return _Line(number, row, "", own, before)


def _check_chain(lines: Sequence[_Line]) -> None:
    """Note where lines are missing, and lines without a checksum among lines that have one."""
    is_old = all(not line.own for line in lines)
    previous = None
    for index, line in enumerate(lines):
        following = lines[index + 1] if index + 1 < len(lines) else None
        if line.row is not None and not line.own and not is_old:
            comes_first = previous is None or (previous.row is not None and not previous.own)
            ends_old = following is None or not following.own or following.before == _START
            if not (comes_first and ends_old):
                line.row, line.problem = None, "is damaged: it has no checksum, and others have one"
        elif line.own and line.row is not None and (previous is None or previous.row is not None):
            expected = _START if previous is None else previous.own or _START
            if line.before != expected:
                line.problem = "does not follow the line before it: lines in between are missing"
        previous = line


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    """Write a file of rows, atomically, see :meth:`JsonLines.append`."""
    parts, before = [], _START
    for row in rows:
        line, before = _line_of(_body_of(row), before)
        parts.append(line)
    replace_file(path, b"".join(parts))


def mend(path: Path, warn: Callable[[str], None]) -> None:
    """Remove damaged lines from a file, so that it can be continued.

    ``warn`` is called with a sentence for each of them, and for each line that follows missing ones.
    """
    lines = read_lines(path)
    for problem in lines.problems:
        warn(f"{problem}: the rest is kept")
    if lines.problems:
        write_lines(path, lines.rows)


def _body_of(row: Any) -> bytes:
    return json.dumps(to_json(row), allow_nan=False).encode()


def _line_of(body: bytes, before: str) -> tuple[bytes, str]:
    own = _checksum(before, body)
    return body[:-1] + f', "checksum": "{own}-{before}"}}\n'.encode(), own


def _checksum(before: str, body: bytes) -> str:
    return f"{zlib.crc32(before.encode() + body):08x}"


def _is_like(text: bytes, shape: bytes) -> bool:
    """Whether a text has a shape but for two characters, which were changed."""

    def fits(char: int, wanted: int) -> bool:
        if wanted == ord("-"):
            return char in b"0123456789abcdef"
        return char == (ord("-") if wanted == ord("_") else wanted)

    return len(text) == len(shape) and sum(not fits(*pair) for pair in zip(text, shape, strict=True)) <= 2


_JSON_TAIL = re.compile(rb',\n  "checksum": "([0-9a-f]{8})"\n\}\n$')
_JSON_SHAPE = b',\n  "checksum": "--------"\n}\n'


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write one object as an indented JSON file with a checksum, atomically. :func:`read_json` reads it."""
    body = json.dumps(to_json(result), indent=2, allow_nan=False).encode()
    replace_file(path, body[:-2] + f',\n  "checksum": "{_checksum("", body)}"\n}}\n'.encode())


def read_json(path: Path) -> Any:
    """The value of a JSON file. Files without a checksum, such as those of older versions, are read too.

    Raises:
        ValueError: it is no JSON, or does not match its checksum. The message does not name the file.
        OSError: the file cannot be read.
    """
    content = read_file(path)
    found = _JSON_TAIL.search(content)
    if found is not None:
        content = content[: found.start()] + b"\n}"
    if (found is not None and _checksum("", content) != found[1].decode()) or (
        found is None and _is_like(content[-len(_JSON_SHAPE) :], _JSON_SHAPE)
    ):
        raise ValueError("it does not match its checksum: if you have edited it, remove its last entry, checksum")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it has too many brackets") from None
