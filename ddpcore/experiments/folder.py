"""The folder of a study that was run: a manifest, a line for each run that ended, and the runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpcore.report.study_folder import FINISHED, FORMAT, MANIFEST, RESULTS, Results, read_manifest, read_results
from ddpcore.storage.files import LOCK
from ddpcore.storage.json_lines import JsonLines, mend, read_lines, to_json, write_json
from ddpcore.storage.limits import shown
from ddpcore.training import TrainConfig, record
from ddpcore.training.checkpoint import Checkpoints


@dataclass(frozen=True)
class Folder:
    """``manifest.json``, ``results.jsonl`` and ``runs/ROW/seed-N``, the folder of each run (see ``train``).

    The manifest contains all that a comparison needs, so the folder stays valid when the study changes.
    """

    path: Path

    @property
    def _manifest(self) -> Path:
        return self.path / MANIFEST

    @property
    def _results(self) -> Path:
        return self.path / RESULTS

    def run_path(self, row: str, seed: int) -> Path:
        """The folder of one run."""
        return self.path / "runs" / row / f"seed-{seed}"

    def manifest(self) -> dict[str, Any]:
        """See :func:`ddpcore.report.study_folder.read_manifest`."""
        return read_manifest(self.path)

    def results(self) -> Results:
        """What :func:`ddpcore.report.study_folder.read_results` finds; :meth:`begin` says what is damaged."""
        return read_results(self.path)[0]

    def finished(self) -> set[tuple[str, int]]:
        """(row, seed) of the runs that finished."""
        return {key for key, line in self.results().items() if line["status"] == FINISHED}

    def append(self, result: Mapping[str, Any]) -> None:
        """Append a line to the results, whole or not at all."""
        with JsonLines(self._results) as file:
            file.append(result)

    def check(self, manifest: Mapping[str, Any], resume: bool) -> None:
        """Raise ValueError unless the folder is new, or contains the same study and ``resume`` is set."""
        if not self.path.exists() or (self.path.is_dir() and all(item.name == LOCK for item in self.path.iterdir())):
            return
        if not self.path.is_dir():
            raise ValueError(f"{shown(self.path)} is a file: name a folder")
        if not self._manifest.exists():
            raise ValueError(f"{shown(self.path)} contains other files: take another folder with --out")
        known = self.manifest()
        for key in ("study", "title", "source", "scale", "set"):
            if known[key] != to_json(manifest[key]):
                was = f"{shown(self.path)} was run with {key} {known[key]!r}, not {manifest[key]!r}"
                raise ValueError(f"{was}: take another folder with --out")
        for name, row in manifest["rows"].items():
            if differences := _differences(row, known["rows"].get(name, row)):
                raise ValueError(
                    f"{shown(self.path)} contains another row {name}: {'; '.join(differences)}: take another folder"
                )
        if not resume:
            raise ValueError(
                f"{shown(self.path)} contains this study already: continue with --resume, or take another folder"
            )

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest. Rows and seeds of an earlier manifest stay in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        mend(self._results, lambda line: print(f"ddpcore.experiments: {line}", file=sys.stderr, flush=True))
        known = self.manifest() if self._manifest.exists() else {"rows": {}, "seeds": []}
        for name, row in known["rows"].items():
            row["published"] = manifest["published"].get(name, row["published"])
        rows = {**known["rows"], **manifest["rows"]}
        seeds = sorted({*known["seeds"], *manifest["seeds"]})
        write_json(self._manifest, {**manifest, "format": FORMAT, "rows": rows, "seeds": seeds})

    def check_runs(self, runs: Iterable[tuple[str, int, TrainConfig]]) -> None:
        """Raise ValueError if an unfinished run in this folder, or a checkpoint of it, has another config."""
        for row, seed, config in runs:
            path = self.run_path(row, seed)
            lines = read_lines(path / record.FILE)
            configs = [line.get("config", {}) for line in lines.rows if line.get("kind") == "run"]
            checkpoints = Checkpoints(folder=path / "checkpoints", config=config.to_dict())
            for step in checkpoints.steps():
                try:
                    configs.append(checkpoints.manifest(step)["config"])
                except (OSError, ValueError, KeyError, TypeError):
                    continue  # train ignores damaged checkpoints, and prints a warning
            for other in configs:
                if differences := config.difference(other):
                    raise ValueError(f"{shown(path)} is another run: {'; '.join(differences)}: take another folder")


def _differences(row: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """The differences between two rows of manifests that change results."""
    unlike = [key for key in ("ranks", "hosts", "kill_rank") if row[key] != known[key]]
    differences = [f"{key} is {row[key]!r}, not {known[key]!r}" for key in unlike]
    return differences + TrainConfig.from_dict(row["config"]).difference(known["config"])
