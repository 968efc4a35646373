"""The folder of a run: the names of its files, its record (one JSON object per line), and its checkpoints."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpcore.records.config import nested
from ddpcore.storage.json_lines import read_lines
from ddpcore.storage.limits import read_file, shown

FORMAT = 2  # of a checkpoint
MANIFEST = "manifest.json"  # of a checkpoint
FILES = re.compile(r"rank-[0-9]+\.(safetensors|json)")  # so a manifest names no file outside its folder


def step_folder(checkpoints: Path, step: int, state: str = "step") -> Path:
    """The folder of a step. ``state``: ``step`` if it is complete, else ``partial``, ``replaced`` or ``damaged``."""
    return checkpoints / f"{state}-{step:08d}"


def steps_of(checkpoints: Path) -> list[int]:
    """Steps that have a checkpoint, complete or damaged, in ascending order."""
    found = (re.fullmatch("step-([0-9]{8,})", path.name) for path in checkpoints.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def rank_files(rank: int | str) -> tuple[str, str]:
    """The names of the two files of a rank: its tensors, and everything else; ``*`` stands for all ranks."""
    return f"rank-{rank}.safetensors", f"rank-{rank}.json"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the complete checkpoint in a folder: format, step, num_ranks, config, files."""
    manifest: dict[str, Any] = json.loads(read_file(folder / MANIFEST))["manifest"]
    return manifest


RECORD = "record.jsonl"
STEPS = "steps"  # a folder with the recorded steps of each rank
MODEL = "model.safetensors"  # the averaged model at the end
CHECKPOINTS = "checkpoints"  # a folder
ADDRESS = "join.json"  # while a run lasts that new ranks can join
LANDSCAPES = "landscape"  # a folder with HDF5 files, see ddpcore.records.surface
_LISTS = {  # kind of a line -> the attribute of a record that has all of this kind
    "resume": "resumed",
    "epoch": "epochs",
    **{kind: kind for kind in ("statistics", "hessian", "nonfinite", "members")},
}


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of one run. The ``kind`` of a line decides which attribute holds it.

    Attributes:
        path: the file.
        header: ``kind`` "run": config (in sections, also of version 0.2), num_parameters, num_samples, num_classes,
            dataset_digest (:meth:`ddpcore.data.Dataset.digest`), total_variation
            (:func:`ddpcore.data.total_variation`, how uneven the ``shards`` are; None for the shards ``even``), device,
            cores, versions, commit, date. Empty if its line is damaged.
        resumed: ``kind`` "resume", one line each time that the run was resumed: step, learners (how many from then on),
            device, cores, versions, commit, date; members, the ids of the ranks, with ``on_failure="shrink"``.
        epochs: ``kind`` "epoch", one line per epoch: epoch (from 1), step, train_loss, lr, batch_size (with
            ``batch_growth``: of a complete batch at the last step), seconds (of training; with ``link``, seconds on the
            emulated network), samples_per_s, consensus_distance, evaluation_seconds, total_seconds. After an evaluation
            also split, and loss, accuracy, precision, recall, f1 and specificity on that split, the last five from 0
            to 1.
        statistics: ``kind`` "statistics", one line every ``statistics_every`` steps: the values of
            :class:`ddpcore.diagnostics.NoiseRecord`, without the values of single parameters.
        members: ``kind`` "members", one line each time that a rank died or joined: the values of ``handle.changes``,
            step (of the check that wrote the line) and text.
        hessian: ``kind`` "hessian", one line every ``hessian_every`` steps: the values of
            :class:`ddpcore.diagnostics.HessianRecord`.
        nonfinite: ``kind`` "nonfinite": the values of :class:`ddpcore.NonFinite`, one line for each learner and step.
        final: ``kind`` "end": step, diverged, diverged_reason (the first number that was not finite), accuracy (of the
            last evaluation), best_accuracy, best_epoch, total_seconds; test, the scores on the test split if the run
            was evaluated on the validation split; flatness, the values of :class:`ddpcore.diagnostics.Flatness`, if the
            config requests it; flatness_reason, why flatness is missing. Empty if the run has not ended.
        problems: a sentence for each line that is damaged; the attributes above have the others, but for lines
            without the number of their step.
    """

    path: Path
    header: dict[str, Any]
    resumed: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    statistics: list[dict[str, Any]]
    final: dict[str, Any]
    hessian: list[dict[str, Any]] = field(default_factory=list)
    nonfinite: list[dict[str, Any]] = field(default_factory=list)
    members: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, out: Path) -> RunRecord:
        """The record in a run's folder. ValueError: there is no record, or nothing of it is left."""
        path = Path(out) / RECORD
        found = read_lines(path)
        header = next((row for row in found.rows if row.get("kind") == "run"), {})
        if not found.rows and found.problems:
            raise ValueError(found.problems[0])
        if found.rows and not header and not found.problems:
            raise ValueError(f"{shown(path)}: no line is of kind run: the file is damaged")
        if not found.rows:
            raise ValueError(f"{shown(path)}: there is no record of a run: train into this folder first")
        if isinstance(config := header.get("config"), dict):
            header = {**header, "config": nested(config)}
        rows = [row for row in found.rows if has_step(row)]
        of = {kind: [row for row in rows if row.get("kind") == kind] for kind in (*_LISTS, "end")}
        lists: dict[str, Any] = {name: of[kind] for kind, name in _LISTS.items()}
        return cls(path=path, header=header, final=(of["end"] or [{}])[-1], problems=found.problems, **lists)


def has_step(line: dict[str, Any]) -> bool:
    """Whether a line has the number of a step."""
    return isinstance(line.get("step"), int) and abs(line["step"]) < 2**53


def step_file(rank: int | str) -> str:
    """The name of the file of a rank in the folder :data:`STEPS`; ``*`` stands for all ranks."""
    return f"rank-{rank}.jsonl"


def rank_of(step_file: Path) -> int | None:
    """The rank of a file with recorded steps; None if it has the name of another file."""
    number = step_file.stem.removeprefix("rank-")
    return int(number) if number.isascii() and number.isdigit() else None
