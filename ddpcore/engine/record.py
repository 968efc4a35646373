"""What a run wrote down: one JSON object a line, in ``record.jsonl`` of its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "record.jsonl"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of one run.

    Attributes:
        path: the file.
        header: ``kind`` "run": config, parameters of the model, device, versions, commit, date.
        epochs: ``kind`` "epoch", one an epoch: epoch (from 1), step, train_loss, lr, seconds, samples_per_s,
            consensus_distance and, where there was an evaluation, split, test_loss, accuracy, precision, recall, f1,
            specificity.
        final: ``kind`` "end": steps, diverged, accuracy (of the last evaluation), best_accuracy, best_epoch, seconds,
            and of a run that chose on the validation split the scores of the test split; empty while it is not over.
    """

    path: Path
    header: dict[str, Any]
    epochs: list[dict[str, Any]]
    final: dict[str, Any]

    @classmethod
    def read(cls, out: Path) -> RunRecord:
        """The record in a run's folder.

        Raises:
            ValueError: there is none, or a line is no JSON.
        """
        path = Path(out) / FILE
        rows: dict[str, list[dict[str, Any]]] = {"run": [], "epoch": [], "end": []}
        for row in _rows(path):
            rows.setdefault(row["kind"], []).append(row)
        if not rows["run"]:
            raise ValueError(f"{path}: there is no record of a run: train into this folder first")
        return cls(path=path, header=rows["run"][0], epochs=rows["epoch"], final=(rows["end"] or [{}])[-1])


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            raise ValueError(f"{path}: line {number} is no JSON: the file is damaged") from None
