"""Values as JSON, without NaN, and files with one JSON object a line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddpcore.storage.files import replace_file


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


class JsonLines:
    """A file to which JSON lines are appended; its folder is made if it is missing.

    Each line is one system call that writes at the end of the file. So a reader never sees half a line, and several
    processes may append to one file.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)

    def append(self, row: Any) -> None:
        """Write a row as one line: a mapping or a dataclass of values that `to_json` accepts."""
        line = json.dumps(to_json(row), allow_nan=False).encode() + b"\n"
        written = self._file.write(line)
        if written != len(line):
            end = self._file.tell()
            if os.fstat(self._file.fileno()).st_size == end:  # no other process has written after it
                os.ftruncate(self._file.fileno(), end - written)
            raise OSError(f"{self.path}: a line could not be written whole, is the disk full?")

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


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """All objects of a file, such as the record of a run; none if the file does not exist.

    An incomplete last line, after a crash, is skipped.

    Raises:
        ValueError: a line is no JSON object.
    """
    text = path.read_text(errors="replace") if path.is_file() else ""
    lines = text.split("\n")  # splitlines() would also split at characters that JSON allows inside a text
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, or thousands of brackets
            if number == len(lines):
                return
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{path}: line {number} is no JSON object: the file is damaged")
        if not isinstance(row.get("config", {}), dict):
            raise ValueError(f"{path}: line {number} has config {row['config']!r}: the file is damaged")
        yield row


def write_json(path: Path, result: Any) -> None:
    """Write one value as an indented JSON file, atomically."""
    replace_file(path, (json.dumps(to_json(result), indent=2, allow_nan=False) + "\n").encode())
