"""The folder of a study that was run: a manifest, a line for each run that ended, and the runs; read and checked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from ddpcore.options.fields import dotted
from ddpcore.options.typed import check_table, is_finite
from ddpcore.records.run import nested
from ddpcore.storage.files import plain, shown
from ddpcore.storage.json_lines import JsonLines, mend, read_json, read_lines, write_json

FORMAT = 1
MANIFEST, RESULTS = "manifest.json", "results.jsonl"
FINISHED, FAILED = "finished", "failed"
# over the steps and epochs of a run
CURVES = {"step": ("effective_lr", "loss", "noise"), "epoch": ("train_loss",), "evaluated epoch": ("accuracy_pct",)}
Results = Mapping[tuple[str, int], dict[str, Any]]
"""The last line of each run, by (row, seed)."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of a source, and the predicate that decides whether it holds."""

    text: str
    source: str
    predicate: str  # see ddpcore.experiments.claims
    a_core_per_rank: bool = False  # it is about the speed of ranks, so it is void where they outnumbered the cores


CLAIM = get_type_hints(Claim)
TEXTS = tuple[str, ...]
TABLE = Mapping[str, Any]
_NUMBERS = Mapping[str, float | None]
_MANIFEST = {
    "format": int, "study": str, "title": str, "question": str, "source": str, "notes": TEXTS, "metrics": TEXTS,
    "claims": tuple[TABLE, ...], "scale": str, "set": TABLE, "seeds": tuple[int, ...], "rows": TABLE,
    "published": Mapping[str, _NUMBERS],
}  # fmt: skip
_ROW = {"config": TABLE, "published": _NUMBERS, "about": str, "ranks": int, "hosts": int, "kill_rank": int | None}
_CHART = {"x": str, "by": str, "lines": Mapping[str, TEXTS]}
_ENDED = {"row": str, "seed": int, "status": str, "metrics": _NUMBERS, "diverged": bool}
_HERE = {"place": str, "device": str, "cores": int, "torch": str, "ddpcore": str, "commit": str | None}
_RESULTS: dict[str, dict[str, Any]] = {FINISHED: _ENDED | _HERE, FAILED: _ENDED | {"error": str}}


@dataclass(frozen=True)
class Folder:
    """``manifest.json``, ``results.jsonl`` and ``runs/ROW/seed-N``, the folder of each run (see ``train``).

    The manifest contains all that a comparison needs, so the folder stays valid when the study changes.
    """

    path: Path

    def run_path(self, row: str, seed: int) -> Path:
        """The folder of one run."""
        return self.path / "runs" / row / f"seed-{seed}"

    def results(self) -> Results:
        """What :func:`read_results` finds; :meth:`begin` says what is damaged."""
        return read_results(self.path)[0]

    def finished(self) -> set[tuple[str, int]]:
        """(row, seed) of the runs that finished."""
        return {key for key, line in self.results().items() if line["status"] == FINISHED}

    def append(self, result: Mapping[str, Any]) -> None:
        """Append a line to the results, whole or not at all."""
        with JsonLines(self.path / RESULTS) as file:
            file.append(result)

    def begin(self, manifest: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        """Write the manifest. Rows and seeds of an earlier one stay in it. Damaged results go, each with a warning."""
        self.path.mkdir(parents=True, exist_ok=True)
        mend(self.path / RESULTS, warn)
        for problem in read_results(self.path)[1]:
            warn(f"{problem}: it counts as not run")
        known = read_manifest(self.path) if (self.path / MANIFEST).exists() else {"rows": {}, "seeds": []}
        for name, row in known["rows"].items():
            row["published"] = manifest["published"].get(name, row["published"])
        rows = {**known["rows"], **manifest["rows"]}
        seeds = sorted({*known["seeds"], *manifest["seeds"]})
        write_json(self.path / MANIFEST, {**manifest, "format": FORMAT, "rows": rows, "seeds": seeds})


def check_chart(spec: Mapping[str, Any]) -> None:
    """Raise ValueError unless a table is an entry ``[[charts]]``, see :func:`ddpcore.experiments.charts.lines_of`."""
    check_table("a chart", {key: value for key, value in spec.items() if key != "values"}, _CHART, ("x",))
    values = spec.get("values", [])
    if not isinstance(values, list) or any(type(value) not in (str, int, float) for value in values):
        raise ValueError(f"a chart: values is {values!r}: it must be a list of numbers or text")
    if ("by" in spec) == ("lines" in spec) or ("by" in spec and "values" in spec):
        raise ValueError(f"the chart over {spec['x']}: give lines, or by without values")


def read_manifest(folder: Path, check_claim: Callable[[str], None] = lambda predicate: None) -> dict[str, Any]:
    """study, title, question, source, notes, metrics, charts, claims, published, scale, set, seeds, and rows.

    ``published`` has all rows of the study. ``rows`` has those that were selected: config (with seed 0 and without
    data_dir), published, about, ranks, hosts and kill_rank of each. ``check_claim`` raises ValueError if a predicate is
    wrong. ValueError: there is no manifest, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        values: dict[str, Any] = read_json(path)
        if isinstance(values, dict):
            values.setdefault("published", {})  # older manifests have none
        check_table("it", values, _MANIFEST | {"charts": tuple[TABLE, ...]}, _MANIFEST, more_keys=True)
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
            check_claim(claim["predicate"])
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
        key = line["row"], line["seed"]
        if not _are_curves(line.get("curves", {})):
            problems.append(f"{shown(path)} is damaged (the curves of row {plain(str(key[0]))}, seed {key[1]})")
            line["curves"] = {}
        if line["status"] == FINISHED or found.get(key, {}).get("status") != FINISHED:
            found[key] = line
    return found, problems


def _are_curves(curves: Any) -> bool:
    """Whether they are what :func:`ddpcore.experiments.metrics.curves_of` returns: lists of numbers, each as its x."""
    groups = [(x, *names) for x, names in CURVES.items()]
    if not isinstance(curves, dict) or not curves.keys() <= {name for group in groups for name in group}:
        return False
    found: list[list[Any]] = [[curves.get(name) for name in group] for group in groups if curves.keys() & {*group}]
    are_lists = all(isinstance(one, list) and len(one) == len(lists[0]) for lists in found for one in lists)
    return are_lists and all(is_finite(value) or value is None for lists in found for one in lists for value in one)
