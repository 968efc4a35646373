"""The folder of a study that was run: a manifest, a line for each run that ended, and the runs; read and checked."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpcore.display.chart import finite
from ddpcore.experiments import claims
from ddpcore.experiments.charts import check_chart
from ddpcore.experiments.claims import CLAIM
from ddpcore.experiments.metrics import CURVES, METRICS
from ddpcore.options.keys import dotted
from ddpcore.options.typed import check_table
from ddpcore.records.config import nested
from ddpcore.records.run import CHECKPOINTS, RECORD
from ddpcore.storage.files import LOCK
from ddpcore.storage.json_lines import JsonLines, mend, read_json, read_lines, to_json, write_json
from ddpcore.storage.limits import plain, shown
from ddpcore.training import TrainConfig
from ddpcore.training.checkpoint import Checkpoints

FORMAT = 1
MANIFEST, RESULTS = "manifest.json", "results.jsonl"
FINISHED, FAILED = "finished", "failed"
Results = Mapping[tuple[str, int], dict[str, Any]]
"""The last line of each run, by (row, seed)."""

_TEXTS = tuple[str, ...]
_TABLE = Mapping[str, Any]
_NUMBERS = Mapping[str, float | None]
_MANIFEST = {
    "format": int, "study": str, "title": str, "question": str, "source": str, "notes": _TEXTS, "metrics": _TEXTS,
    "claims": tuple[_TABLE, ...], "scale": str, "set": _TABLE, "seeds": tuple[int, ...], "rows": _TABLE,
    "published": Mapping[str, _NUMBERS],
}  # fmt: skip
_ROW = {"config": _TABLE, "published": _NUMBERS, "about": str, "ranks": int, "hosts": int, "kill_rank": int | None}
_ENDED = {"row": str, "seed": int, "status": str, "metrics": _NUMBERS, "diverged": bool}
_HERE = {"place": str, "device": str, "cores": int, "torch": str, "ddpcore": str, "commit": str | None}
_RESULTS: dict[str, dict[str, Any]] = {FINISHED: _ENDED | _HERE, FAILED: _ENDED | {"error": str}}


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
        """See :func:`read_manifest`."""
        return read_manifest(self.path)

    def results(self) -> Results:
        """What :func:`read_results` finds; :meth:`begin` says what is damaged."""
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
            lines = read_lines(path / RECORD)
            configs = [line.get("config", {}) for line in lines.rows if line.get("kind") == "run"]
            checkpoints = Checkpoints(folder=path / CHECKPOINTS, config=config.to_dict())
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


def read_manifest(folder: Path) -> dict[str, Any]:
    """study, title, question, source, notes, metrics, charts, claims, published, scale, set, seeds, and rows.

    ``published`` has all rows of the study. ``rows`` has those that were selected: config (with seed 0 and without
    data_dir), published, about, ranks, hosts and kill_rank of each.

    Raises:
        ValueError: there is no manifest, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        values: dict[str, Any] = read_json(path)
        if isinstance(values, dict):
            values.setdefault("published", {})  # older manifests have none
        check_table("it", values, _MANIFEST | {"charts": tuple[_TABLE, ...]}, _MANIFEST, more_keys=True)
        if values["format"] != FORMAT:
            raise ValueError(f"it is of format {values['format']} and this version reads {FORMAT}")
        values["set"] = dotted(nested(values["set"]))  # older manifests have a flat one
        if not values["metrics"]:
            raise ValueError("it has no metrics")
        for name, row in values["rows"].items():
            check_table(f"row {name}", row, _ROW, _ROW, more_keys=True)
            row["config"] = nested(row["config"])
        for spec in values.get("charts", ()):
            check_chart(spec)
        for claim in values["claims"]:
            claim.setdefault("a_core_per_rank", False)  # older manifests have none
            check_table("a claim", claim, CLAIM, CLAIM, more_keys=True)
            claims.check(claim["predicate"], None, tuple(METRICS))
    except OSError:
        raise ValueError(f"{shown(folder)}: there is no study in this folder: run one into it first") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shown(path)} is damaged ({plain(str(error))}): take another folder") from None
    return values


def read_results(folder: Path) -> tuple[Results, list[str]]:
    """The last line of each (row, seed), and a sentence for each line, or each part of one, that is damaged.

    A failed run does not replace a finished one. Damaged curves cost only the curves of their line.
    """
    path = folder / RESULTS
    lines = read_lines(path)
    problems = list(lines.problems)
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for line in lines.rows:
        try:
            hints = _RESULTS.get(str(line.get("status")), _ENDED)
            check_table("a line", line, hints, hints, more_keys=True)
        except ValueError as error:
            problems.append(f"{shown(path)} is damaged ({plain(str(error))})")
            continue
        if not _are_curves(line.get("curves", {})):
            problems.append(
                f"{shown(path)} is damaged (the curves of row {plain(str(line['row']))}, seed {line['seed']})"
            )
            line["curves"] = {}
        key = line["row"], line["seed"]
        if line["status"] == FINISHED or found.get(key, {}).get("status") != FINISHED:
            found[key] = line
    return found, problems


def _are_curves(curves: Any) -> bool:
    """Whether they are what :func:`ddpcore.experiments.metrics.curves_of` returns: lists of numbers of one length."""
    if not isinstance(curves, dict) or (curves and not curves.keys() >= {"step", *CURVES}):
        return False
    lists = list(curves.values())
    return all(isinstance(one, list) and len(one) == len(lists[0]) for one in lists) and all(
        finite(value) is not None or value is None for one in lists for value in one
    )
