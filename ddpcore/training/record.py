"""What a run wrote down: one JSON object a line, in ``record.jsonl`` of its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpcore.storage.files import replace_file

FILE = "record.jsonl"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of one run.

    Attributes:
        path: the file.
        header: ``kind`` "run": config, num_parameters, num_samples, num_classes, dataset_digest
            (:meth:`ddpcore.data.Dataset.digest`), device, versions, commit, date.
        resumed: ``kind`` "resume", one each time that the run went on: step, and device, versions, commit, date.
        epochs: ``kind`` "epoch", one an epoch: epoch (from 1), step, train_loss, lr, seconds (of training, over a
            config's link as they would be there),
            samples_per_s, consensus_distance, evaluation_seconds, total_seconds, and where there was an evaluation
            split, loss, accuracy, precision, recall, f1, specificity, all of that split and 0..1.
        statistics: ``kind`` "statistics", one every ``statistics_every`` steps: what
            :class:`ddpcore.diagnostics.NoiseRecord` holds, without single parameters.
        final: ``kind`` "end": step, diverged, accuracy (of the last evaluation), best_accuracy, best_epoch,
            total_seconds, and test, the scores of the test split, of a run that was evaluated on the validation split;
            flatness, what :class:`ddpcore.diagnostics.Flatness` holds, where it was asked for; flatness_reason, why
            there is none then; empty while the run is not over.
    """

    path: Path
    header: dict[str, Any]
    resumed: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    statistics: list[dict[str, Any]]
    final: dict[str, Any]

    @classmethod
    def read(cls, out: Path) -> RunRecord:
        """The record in a run's folder.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        path = Path(out) / FILE
        kinds: dict[str, list[dict[str, Any]]] = {"run": [], "resume": [], "epoch": [], "statistics": [], "end": []}
        for row in rows(path):
            kinds.setdefault(row.get("kind", ""), []).append(row)
        if any(kinds.values()) and not kinds["run"]:
            raise ValueError(f"{path}: no line is of kind run: the file is damaged")
        if not kinds["run"]:
            raise ValueError(f"{path}: there is no record of a run: train into this folder first")
        return cls(
            path=path,
            header=kinds["run"][0],
            resumed=kinds["resume"],
            epochs=kinds["epoch"],
            statistics=kinds["statistics"],
            final=(kinds["end"] or [{}])[-1],
        )


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Every line of a record; none where there is no file.

    A last line that a crash has cut off, or a full disk, is passed over; :func:`mend` takes it away.

    Raises:
        ValueError: a line is no JSON object.
    """
    text = path.read_text(errors="replace") if path.is_file() else ""
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines) and not text.endswith("\n"):
                return
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{path}: line {number} is no JSON object: the file is damaged")
        if not isinstance(row.get("config", {}), dict):
            raise ValueError(f"{path}: line {number} has config {row['config']!r}: the file is damaged")
        yield row


def mend(path: Path) -> None:
    """Take away a last line that was cut off, so that the next one does not follow in it."""
    content = path.read_bytes() if path.is_file() else b""
    if content and not content.endswith(b"\n"):
        replace_file(path, b"".join(json.dumps(row).encode() + b"\n" for row in rows(path)))
