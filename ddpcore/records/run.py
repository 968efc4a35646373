"""The folder of a run: names of its files, its record (a JSON object a line), checkpoints, and configs, also of 0.2."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpcore.options.fields import put
from ddpcore.storage.files import read_file, shown
from ddpcore.storage.json_lines import read_lines

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
    return json.loads(read_file(folder / MANIFEST))["manifest"]


RECORD = "record.jsonl"
STEPS = "steps"  # a folder with the recorded steps of each rank
MODEL = "model.safetensors"  # the averaged model at the end
CHECKPOINTS = "checkpoints"  # a folder
ADDRESS = "join.json"  # while a run lasts that new ranks can join
LANDSCAPES = "landscape"  # a folder with HDF5 files, see ddpcore.records.surface
# Kind of a line -> the attribute of a record that has all of this kind
_LISTS = {"resume": "resumed", "epoch": "epochs"} | {k: k for k in ("statistics", "hessian", "nonfinite", "members")}


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
            also split, and loss, accuracy, precision, recall, f1, specificity on that split, the last five in [0, 1].
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
    def read(cls, out: Path) -> "RunRecord":
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


SECTIONS = ("model", "data", "optimizer", "strategy", "run")
# Keys of a config that change no result: they may change when a run is resumed, and do not tell two runs apart.
BOOKKEEPING = (
    *("data.data_dir", "data.download", "strategy.timeout", "strategy.learners_at_once"),
    *("run.checkpoint_every", "run.keep_last", "run.keep_best", "run.save_nonfinite", "run.record_steps"),
)
_NAMES_0_2 = {
    "model": "model", "dataset": "data", "optimizer": "optimizer", "schedule": "optimizer.schedule",
    "strategy": "strategy", "topology": "strategy.topology", "shards": "data.shards",
}  # fmt: skip
_FIELDS_0_2 = {
    "model": "channels_last precision compile",
    "data": "data_dir download normalize augment num_validation num_train num_test random_labels sampler drop_last "
    "batch_size batch_growth batch_growth_lr accumulation",
    "optimizer": "param_groups lr reference_batch_size schedule_unit milestones gamma warmup warmup_start "
    "label_smoothing max_grad_norm",
    "strategy": "policies learners transport link on_failure timeout on_nonfinite",
    "run": "epochs steps device target evaluate_every evaluate_on evaluation_batch_norm recalibration_batches "
    "statistics_every statistics_samples hessian_every hessian_samples hessian_top flatness_samples escape_loss "
    "record_steps seed diverged_above checkpoint_every keep_last keep_best save_nonfinite",
}
# The key of each field of version 0.2, in which a config was one flat table.
KEYS_0_2: Mapping[str, str] = {
    **{f"{name}_options": key for name, key in _NAMES_0_2.items()},
    **_NAMES_0_2,
    **{name: f"{section}.{name}" for section, names in _FIELDS_0_2.items() for name in names.split()},
}


def key_of_0_2(key: str) -> str | None:
    """The key that replaces one of version 0.2, such as ``optimizer.momentum`` for ``optimizer_options.momentum``."""
    name, dot, option = key.partition(".")
    return KEYS_0_2[name] + dot + option if name in KEYS_0_2 and key not in SECTIONS else None


def from_0_2(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a flat config of version 0.2; a section is left out if nothing of it is there.

    Fields that version 0.2 did not have stay as they are, so that :class:`ddpcore.training.TrainConfig` refuses them.
    """
    found: dict[str, Any] = {}
    for name in (*_NAMES_0_2, *config):  # names first: an option goes to the part that has it
        if name in config:
            value, key = config[name], KEYS_0_2.get(name, name)
            if name.endswith("_options") and isinstance(value, Mapping):
                for option, of_option in value.items():
                    put(found, f"{key}.{option}", of_option)
            elif name in _NAMES_0_2 or name in KEYS_0_2:
                put(found, f"{key}.name" if name in _NAMES_0_2 else key, value)
            else:
                found[name] = value
    strategy = found.get("strategy")
    if isinstance(strategy, dict) and isinstance(policies := strategy.get("policies"), Mapping):
        # "keep" was the default of the policy that is gone.
        strategy["policies"] = {key: value for key, value in policies.items() if (key, value) != ("scaler", "keep")}
    return found


def nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config of a file in sections; one of version 0.2 is converted, see :func:`from_0_2`."""
    is_nested = all(isinstance(value, Mapping) for value in config.values()) and set(config) <= set(SECTIONS)
    return dict(config) if is_nested else from_0_2(config)
