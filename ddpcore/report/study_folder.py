"""What the folder of a study holds: its manifest and its results, read and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from ddpcore.options.typed import check_table
from ddpcore.report import claims
from ddpcore.report.claims import Claim
from ddpcore.report.metrics import METRICS
from ddpcore.storage.json_lines import rows
from ddpcore.storage.limits import plain, read_file, shown

CLAIM = get_type_hints(Claim)
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


def read_manifest(folder: Path) -> dict[str, Any]:
    """study, title, question, source, notes, metrics, claims, published, scale, set, seeds, and rows.

    ``published`` has all rows of the study. ``rows`` has those that were selected: config (with seed 0 and without
    data_dir), published, about, ranks, hosts and kill_rank of each.

    Raises:
        ValueError: there is no manifest, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        values: dict[str, Any] = json.loads(read_file(path))
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
            check_table("a claim", claim, CLAIM, CLAIM, more_keys=True)
            claims.check(claim["predicate"], None, tuple(METRICS))
    except OSError:
        raise ValueError(f"{shown(folder)}: there is no study in this folder: run one into it first") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shown(path)} is damaged ({plain(str(error))}): take another folder") from None
    return values


def read_results(folder: Path) -> Results:
    """The last line of each (row, seed); a failed run does not replace a finished one.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / RESULTS
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for line in rows(path):
        try:
            hints = _RESULTS.get(str(line.get("status")), _ENDED)
            check_table("a line", line, hints, hints, more_keys=True)
        except ValueError as error:
            raise ValueError(f"{shown(path)} is damaged ({plain(str(error))}): take another folder") from None
        key = line["row"], line["seed"]
        if line["status"] == FINISHED or found.get(key, {}).get("status") != FINISHED:
            found[key] = line
    return found
