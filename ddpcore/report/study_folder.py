"""What the folder of a study holds: its manifest and its results, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from ddpcore.options.typed import check_table
from ddpcore.report import claims
from ddpcore.report.chart import finite
from ddpcore.report.claims import Claim
from ddpcore.report.metrics import METRICS
from ddpcore.storage.json_lines import read_json, read_lines
from ddpcore.storage.limits import plain, shown

CLAIM = get_type_hints(Claim)
FORMAT = 1
MANIFEST, RESULTS = "manifest.json", "results.jsonl"
FINISHED, FAILED = "finished", "failed"
Results = Mapping[tuple[str, int], dict[str, Any]]
"""The last line of each run, by (row, seed)."""

CURVES = ("effective_lr", "loss", "noise")
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


def read_manifest(folder: Path) -> dict[str, Any]:
    """study, title, question, source, notes, metrics, claims, published, scale, set, seeds, and rows.

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
        check_table("it", values, _MANIFEST, _MANIFEST, more_keys=True)
        if values["format"] != FORMAT:
            raise ValueError(f"it is of format {values['format']} and this version reads {FORMAT}")
        if not values["metrics"]:
            raise ValueError("it has no metrics")
        for name, row in values["rows"].items():
            check_table(f"row {name}", row, _ROW, _ROW, more_keys=True)
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
    """Whether they are what :func:`ddpcore.experiments.results.curves_of` returns: lists of numbers of one length."""
    if not isinstance(curves, dict) or (curves and not curves.keys() >= {"step", *CURVES}):
        return False
    lists = list(curves.values())
    return all(isinstance(one, list) and len(one) == len(lists[0]) for one in lists) and all(
        finite(value) is not None or value is None for one in lists for value in one
    )
