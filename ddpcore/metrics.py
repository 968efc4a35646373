"""Numbers about a run, and how they are written down: one JSON object a line, never NaN."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import torch


def confusion_matrix(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Counts int64 [C, C + 1] of samples by label (row) and largest logit (column); logits [N, C], labels int64 [N].

    The last column counts rows with a NaN, which choose no class. Matrices of parts of a data set add up to that of the
    whole. ValueError if the shapes do not fit, N = 0 or a label is outside 0..C-1.
    """
    _check_shapes("confusion_matrix", logits, labels)
    num_classes = logits.shape[1]
    if int(labels.min()) < 0 or int(labels.max()) >= num_classes:
        raise ValueError(f"confusion_matrix: a label is outside 0..{num_classes - 1}, the classes of the logits")
    choices = torch.where(logits.isnan().any(dim=1), num_classes, logits.argmax(dim=1))
    cells = (labels * (num_classes + 1) + choices).bincount(minlength=num_classes * (num_classes + 1))
    return cells.view(num_classes, num_classes + 1)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How well classes are told apart, each from 0 to 1; all but accuracy are means over classes (macro)."""

    accuracy: float
    precision: float
    recall: float
    f1: float
    specificity: float


def scores(confusion: torch.Tensor) -> Scores:
    """The scores of a `confusion_matrix`.

    With TP, FP, FN, TN of one class against all others: precision TP / (TP + FP), recall TP / (TP + FN), F1
    2 TP / (2 TP + FP + FN), specificity TN / (TN + FP), averaged over the classes that occur as a label or a choice.
    0 / 0 counts as 0. So F1 is the mean of the classes' F1, and recall is accuracy where classes are equally frequent.
    ValueError if the matrix is not [C, C + 1] or counts nothing.
    """
    if confusion.ndim != 2 or confusion.shape[1] != confusion.shape[0] + 1 or int(confusion.sum()) < 1:
        raise ValueError(f"scores: a matrix of {list(confusion.shape)} must be [C, C + 1] and count a sample at least")
    counts = confusion.double().cpu()
    total, right_C = counts.sum(), counts.diagonal()
    false_positive_C = counts.sum(0)[:-1] - right_C
    false_negative_C = counts.sum(1) - right_C
    true_negative_C = total - right_C - false_positive_C - false_negative_C
    occurs_C = right_C + false_positive_C + false_negative_C > 0

    def mean_ratio(part_C: torch.Tensor, rest_C: torch.Tensor) -> float:
        return float((part_C / (part_C + rest_C)).nan_to_num(0.0)[occurs_C].mean())

    return Scores(
        accuracy=float(right_C.sum() / total),
        precision=mean_ratio(right_C, false_positive_C),
        recall=mean_ratio(right_C, false_negative_C),
        f1=mean_ratio(2 * right_C, false_positive_C + false_negative_C),
        specificity=mean_ratio(true_negative_C, false_positive_C),
    )


def _check_shapes(what: str, logits: torch.Tensor, labels: torch.Tensor) -> None:
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or len(labels) == 0:
        shapes = f"logits {list(logits.shape)} and labels {list(labels.shape)}"
        raise ValueError(f"{what}: {shapes} must be [N, C] and [N], N at least 1")


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

    Each line goes to the system in one write at the end of the file, so a reader never meets half a line and several
    processes may append to one file.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)

    def append(self, row: Any) -> None:
        """Write a row, a mapping or a dataclass, as one line; see `to_json` for what it may hold."""
        line = json.dumps(to_json(row), allow_nan=False).encode() + b"\n"
        written = self._file.write(line)
        if written != len(line):
            end = self._file.tell()
            if os.fstat(self._file.fileno()).st_size == end:  # nobody has written after it
                os.ftruncate(self._file.fileno(), end - written)
            raise OSError(f"{self.path}: a line could not be written whole, is the disk full?")

    def sync(self) -> None:
        """Return once all lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; a second time is harmless."""
        self._file.close()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
