"""Numbers about a run, and how they are written down: one JSON object a line, never NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import torch


def error_pct(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Percentage of samples whose largest logit is not the label's; logits [N, C], labels int64 [N].

    A row with a NaN is an error: argmax would report its NaN as a choice. ValueError if the shapes do not fit or N = 0.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or len(labels) == 0:
        shapes = f"logits {list(logits.shape)} and labels {list(labels.shape)}"
        raise ValueError(f"error_pct: {shapes} must be [N, C] and [N], N at least 1")
    correct = (logits.argmax(dim=1) == labels) & ~logits.isnan().any(dim=1)
    return 100.0 * (len(labels) - int(correct.sum())) / len(labels)


def quantiles(values: Iterable[float]) -> dict[str, float]:
    """The 20th, 50th and 80th percentile, linear between neighbours, in the unit of the values. ValueError if none."""
    samples = np.fromiter(values, dtype=np.float64)
    if samples.size == 0:
        raise ValueError("quantiles: there are no values, give at least one")
    low, middle, high = np.quantile(samples, (0.2, 0.5, 0.8)).tolist()
    return {"p20": low, "p50": middle, "p80": high}


def json_number(x: float) -> float | None:
    """The number, or None for NaN and the infinities, which JSON cannot spell."""
    return x if math.isfinite(x) else None


def to_json(obj: Any) -> Any:
    """The same value made of dict, list, str, int, float, bool and None only; NaN and infinity become None.

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


class Record:
    """A file of JSON lines that only grows; the folder is made if it is missing.

    Each line goes to the system in one write at the end of the file, so a reader or a crash never meets half a line
    and several processes may append to one file.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)

    def append(self, row: Any) -> None:
        """Write a row, a mapping or a dataclass, as one line; see `to_json` for what it may hold."""
        line = json.dumps(to_json(row), allow_nan=False).encode() + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(f"{self.path}: only part of a line could be written, is the disk full?")

    def close(self) -> None:
        """Close the file; a second time is harmless."""
        self._file.close()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
