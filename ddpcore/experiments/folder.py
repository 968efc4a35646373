"""The folder of a study that was run: what it is, a line for each (row, seed) that ended, and the runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from ddpcore.engine import TrainConfig, record
from ddpcore.engine.checkpoint import Checkpoints
from ddpcore.engine.files import LOCK, replace_file
from ddpcore.experiments import claims
from ddpcore.experiments.results import METRICS
from ddpcore.metrics import Record, to_json

FORMAT = 1
FINISHED, FAILED = "finished", "failed"


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(number, int | float | None) for number in value.values())


_MANIFEST = {
    "format": int, "study": str, "title": str, "question": str, "source": str, "notes": _texts, "metrics": _texts,
    "claims": list, "scale": str, "set": dict, "seeds": list, "rows": dict,
}  # fmt: skip
_ROW = {"config": dict, "published": _numbers, "about": str, "ranks": int, "hosts": int, "kill_rank": int | None}
_CLAIM = {"text": str, "source": str, "predicate": str}
_RESULTS: dict[str, dict[str, Any]] = {
    FINISHED: {
        "metrics": _numbers, "diverged": bool, "place": str, "device": str, "cores": int, "torch": str, "ddpcore": str,
        "commit": str | None,
    },
    FAILED: {"metrics": _numbers, "diverged": bool, "error": str},
}  # fmt: skip


@dataclass(frozen=True)
class Folder:
    """``manifest.json``, ``results.jsonl`` and ``runs/ROW/seed-N``, each of the last as ``train`` makes it.

    The manifest holds all that a comparison needs: the study may change, the folder stays what it was.
    """

    path: Path

    @property
    def manifest_path(self) -> Path:
        """Its file."""
        return self.path / "manifest.json"

    def run_path(self, row: str, seed: int) -> Path:
        """The folder of one run."""
        return self.path / "runs" / row / f"seed-{seed}"

    def manifest(self) -> dict[str, Any]:
        """study, title, source, notes, metrics, claims, published (of all rows), scale, set, seeds, and rows: for each
        that was chosen its config (with seed 0 and no data_dir), published, about, ranks, hosts and kill_rank.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        try:
            values: dict[str, Any] = json.loads(self.manifest_path.read_text())
            _demand("it", values, _MANIFEST)
            if values["format"] != FORMAT:
                raise ValueError(f"it is of format {values['format']} and this version reads {FORMAT}")
            if not values["metrics"]:
                raise ValueError("it has no metrics")
            values.setdefault("published", {})  # older ones have none
            _demand("it", values, {"published": dict})
            _demand("published", values["published"], dict.fromkeys(values["published"], _numbers))
            for name, row in values["rows"].items():
                _demand(f"row {name}", row, _ROW)
            for claim in values["claims"]:
                _demand("a claim", claim, _CLAIM)
                claims.check(claim["predicate"], None, tuple(METRICS))
        except OSError:
            raise ValueError(f"{self.path}: there is no study in this folder: run one into it first") from None
        except ValueError as error:
            raise ValueError(f"{self.manifest_path} is damaged ({error}): take another folder") from None
        return values

    def results(self) -> dict[tuple[str, int], dict[str, Any]]:
        """The last line of each (row, seed); no failure takes the place of a finished run.

        Raises:
            ValueError: the file is damaged.
        """
        path = self.path / "results.jsonl"
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for row in record.rows(path):
            try:
                _demand("a line", row, {"row": str, "seed": int, "status": str})
                key, status = (row["row"], row["seed"]), row["status"]
                _demand(f"row {key[0]}, seed {key[1]}", row, _RESULTS.get(status, {}))
            except ValueError as error:
                raise ValueError(f"{path} is damaged ({error}): take another folder") from None
            if status == FINISHED or found.get(key, {}).get("status") != FINISHED:
                found[key] = row
        return found

    def finished(self) -> set[tuple[str, int]]:
        """The (row, seed) that are done."""
        return {key for key, row in self.results().items() if row["status"] == FINISHED}

    def append(self, result: Mapping[str, Any]) -> None:
        """Add a line, whole or not at all."""
        with Record(self.path / "results.jsonl") as file:
            file.append(result)

    def check(self, manifest: Mapping[str, Any], resume: bool) -> None:
        """Raise ValueError unless the study can be run into it: it is new, or holds this study and is resumed."""
        if not self.path.exists() or (self.path.is_dir() and all(item.name == LOCK for item in self.path.iterdir())):
            return
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is a file: name a folder")
        if not self.manifest_path.exists():
            raise ValueError(f"{self.path} holds other files: take another folder with --out")
        known = self.manifest()
        for key in ("study", "title", "source", "scale", "set"):
            if known[key] != to_json(manifest[key]):
                raise ValueError(
                    f"{self.path} was run with {key} {known[key]!r}, not {manifest[key]!r}: take another folder with "
                    "--out"
                )
        for name, row in manifest["rows"].items():
            differences = differing(row, known["rows"][name]) if name in known["rows"] else []
            if differences:
                raise ValueError(f"{self.path} holds another row {name}: {'; '.join(differences)}: take another folder")
        if not resume:
            raise ValueError(f"{self.path} holds this study already: go on with --resume, or take another folder")
        self.results()

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest; rows and seeds that the folder held before stay in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        record.mend(self.path / "results.jsonl")
        known = self.manifest() if self.manifest_path.exists() else {"rows": {}, "seeds": []}
        for name, row in known["rows"].items():
            row["published"] = manifest["published"].get(name, row["published"])
        whole = {
            **manifest,
            "format": FORMAT,
            "rows": {**known["rows"], **manifest["rows"]},
            "seeds": sorted({*known["seeds"], *manifest["seeds"]}),
        }
        replace_file(self.manifest_path, (json.dumps(to_json(whole), indent=2) + "\n").encode())

    def check_runs(self, runs: Iterable[tuple[str, int, TrainConfig]]) -> None:
        """Raise ValueError where an unfinished run, or a checkpoint of it, is of another config."""
        for row, seed, config in runs:
            path = self.run_path(row, seed)
            if not path.exists():
                continue
            said = [row.get("config", {}) for row in record.rows(path / record.FILE) if row.get("kind") == "run"]
            checkpoints = Checkpoints(folder=path / "checkpoints", config=config.to_dict())
            for step in checkpoints.steps():
                try:
                    said.append(checkpoints.manifest(step)["config"])
                except (OSError, ValueError, KeyError, TypeError):
                    continue  # train passes damaged ones over, and says so
            for other in said:
                differences = config.difference(other)
                if differences:
                    raise ValueError(f"{path} is another run: {'; '.join(differences)}: take another folder")


def differing(row: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """Where two rows of manifests would give other results."""
    unlike = [key for key in ("ranks", "hosts", "kill_rank") if row[key] != known[key]]
    places = [f"{key} is {row[key]!r}, not {known[key]!r}" for key in unlike]
    return places + TrainConfig.from_dict(row["config"]).difference(known["config"])


def _demand(what: str, values: Any, kinds: Mapping[str, Any]) -> None:
    """ValueError unless it is a mapping with these keys, of these kinds."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{what} is {values!r}, no mapping")
    for key, kind in kinds.items():
        if key not in values:
            raise ValueError(f"{what} has no {key}")
        if not (kind(values[key]) if isinstance(kind, FunctionType) else isinstance(values[key], kind)):
            raise ValueError(f"{what} has {key} {values[key]!r}")
