"""Published beside measured, as plain values for ``ddpcore.report``."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from ddpcore.experiments.claims import NOT_RUN, Outcome, Verdict, judge, num_seeds
from ddpcore.experiments.folder import FAILED, FINISHED, Folder
from ddpcore.experiments.results import counts_diverged, outcome_of


def compare(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """One comparison a study, of the folders in ``paths``.

    Returns:
        For each study: study, title, question, source, notes, metrics; runs, one a folder: name, scale, seeds, set and
        device; curves, one a run: by row those of its seeds, see :func:`ddpcore.experiments.results.curves_of`; lines,
        one a row and metric: row, about, metric, published (a number or None), measured (one a run: see
        :func:`_spread`; None where it was not run); claims: text, source, predicate, on_published and verdicts (one a
        run), each with word and reason.

    Raises:
        ValueError: a folder holds no study, or two of one study differ in what they ask or in a row of one name.
    """
    by_study: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for path in paths:
        manifest = Folder(path).manifest()
        by_study.setdefault(manifest["study"], []).append((path, manifest))
    return [_compare_study(entries) for entries in by_study.values()]


def _compare_study(entries: Sequence[tuple[Path, dict[str, Any]]]) -> dict[str, Any]:
    manifest = entries[0][1]
    rows: dict[str, Any] = {}
    table: dict[str, Any] = {}  # of what was published, of rows that were not run too
    for path, other in entries:
        for key in ("title", "question", "source", "metrics"):
            if other[key] != manifest[key]:
                raise ValueError(f"{path}: its {key} is another than in {entries[0][0]}: compare it alone")
        for name, row in other["rows"].items():
            rows.setdefault(name, row)
        numbers = {**other["published"], **{name: row["published"] for name, row in other["rows"].items()}}
        for name, values in numbers.items():
            if table.setdefault(name, values) != values:
                raise ValueError(
                    f"{path}: row {name} has other published numbers than in {entries[0][0]}: compare it alone"
                )
    results = [Folder(path).results() for path, _ in entries]
    claims = _each_once(other["claims"] for _, other in entries)
    published = {name: {0: Outcome(metrics=values)} for name, values in table.items() if values}
    return {
        **{key: manifest[key] for key in ("study", "title", "question", "source", "metrics")},
        "notes": _each_once(other["notes"] for _, other in entries),
        "runs": [_run(path, other, found) for (path, other), found in zip(entries, results, strict=True)],
        "curves": [_curves(rows, found) for found in results],
        "lines": [
            _line(name, row, metric, results)
            for name, row in rows.items()
            for metric in manifest["metrics"]
            if metric in row["published"]
            or any(_has(found, name, metric) for found in results)
            or metric == manifest["metrics"][0]
        ],
        "claims": [
            {
                **claim,
                "on_published": asdict(judge(claim["predicate"], published, manifest["metrics"][0], printed=True)),
                "verdicts": [asdict(_judge(claim["predicate"], found, manifest["metrics"][0])) for found in results],
            }
            for claim in claims
        ],
    }


def _each_once(lists: Iterable[list[Any]]) -> list[Any]:
    """What any of them holds, in the order in which it comes."""
    items = list(chain(*lists))
    return [item for number, item in enumerate(items) if item not in items[:number]]


Results = Mapping[tuple[str, int], Mapping[str, Any]]


def _judge(predicate: str, results: Results, metric: str) -> Verdict:
    outcomes: dict[str, dict[int, Outcome]] = {}
    for (row, seed), result in results.items():
        if result["status"] == FINISHED:
            outcomes.setdefault(row, {})[seed] = outcome_of(dict(result))
    verdict = judge(predicate, outcomes, metric)
    if verdict.word == NOT_RUN:
        return verdict
    return Verdict(verdict.word, f"n={num_seeds(predicate, outcomes)}")


def _run(path: Path, manifest: Mapping[str, Any], results: Results) -> dict[str, Any]:
    finished = [result for result in results.values() if result["status"] == FINISHED]
    devices = sorted({f"{result['device']}, {result['cores']} cores, torch {result['torch']}" for result in finished})
    return {
        "name": str(path),
        **{key: manifest[key] for key in ("scale", "seeds", "set")},
        "devices": devices,
        "commits": sorted({result["commit"] or f"ddpcore {result['ddpcore']}" for result in finished}),
        "stand_ins": sorted({result["place"] for result in finished if "of one machine" in result["place"]}),
        "failures": [
            {key: result[key] for key in ("row", "seed", "error")}
            for result in results.values()
            if result["status"] == FAILED
        ],
    }


def _curves(rows: Mapping[str, Any], results: Results) -> dict[str, list[dict[str, list[float]]]]:
    found: dict[str, list[dict[str, list[float]]]] = {}
    for row in rows:
        curves = [result["curves"] for (name, _), result in results.items() if name == row and result.get("curves")]
        if curves:
            found[row] = curves
    return found


def _has(results: Results, row: str, metric: str) -> bool:
    return any(name == row and result["metrics"].get(metric) is not None for (name, _), result in results.items())


def _line(name: str, row: Mapping[str, Any], metric: str, results: Sequence[Results]) -> dict[str, Any]:
    return {
        "row": name,
        "about": row["about"],
        "metric": metric,
        "published": row["published"].get(metric),
        "measured": [_spread(name, metric, found) for found in results],
    }


def _spread(row: str, metric: str, results: Results) -> dict[str, Any] | None:
    """num_seeds that have a number, their mean, std (None of one), min and max; num_diverged and num_failed.

    What a run that diverged says is in no mean, but where the metric says what it counts for.
    """
    mine = [result for (name, _), result in results.items() if name == row]
    if not mine:
        return None
    counted = [result for result in mine if not result["diverged"] or counts_diverged(metric)]
    values = [result["metrics"][metric] for result in counted if result["metrics"].get(metric) is not None]
    return {
        "num_seeds": len(values),
        "mean": statistics.fmean(values) if values else None,
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "min": min(values, default=None),
        "max": max(values, default=None),
        "num_diverged": sum(result["diverged"] for result in mine),
        "num_failed": sum(result["status"] == FAILED for result in mine),
    }
