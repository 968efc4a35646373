"""Published numbers beside measured ones: as plain values, as tables for the terminal and as Markdown."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from ddpcore.display.table import cell_of, print_parts
from ddpcore.experiments.claims import Outcome, judge
from ddpcore.experiments.metrics import counts_diverged
from ddpcore.experiments.study import STUDIES, check_claim
from ddpcore.records.study import FAILED, FINISHED, Results, read_manifest, read_results
from ddpcore.storage.files import plain, shown


def compare(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """One comparison per study, of the folders in ``paths``.

    It has study, title, question, source, notes, metrics, charts (as in the study), and

    - runs, one per folder: name, scale, seeds, set, devices, commits, stand_ins and failures;
    - problems: a sentence for each damaged line of the results, and for each place where lines are missing;
    - configs, one mapping per folder: row -> its config there;
    - curves, one mapping per folder: row -> :func:`ddpcore.experiments.metrics.curves_of` of each seed;
    - lines, one per row and metric: row, about, config (of a folder of scale full without --set, if there is one),
      metric, published (a number or None), and measured, one per folder (see :func:`_spread`; None: it was not run);
    - claims: text, source, predicate, on_published and verdicts (one per folder), each with word and reason.

    ValueError: a folder contains no study, or two folders of one study differ in a heading or in published numbers.
    """
    by_study: dict[str, list[_Folder]] = {}
    for path in paths:
        manifest = read_manifest(path, check_claim)
        results, problems = read_results(path)
        others = sorted({row for row, _ in results}.difference(manifest["rows"]))
        problems += [f"{shown(path)} has results of row {plain(row)}, which is not in its manifest" for row in others]
        by_study.setdefault(manifest["study"], []).append(_Folder(str(path), manifest, results, problems))
    return [_compare_study(folders) for folders in by_study.values()]


class _Folder(NamedTuple):
    """The folder of a study, or several as one, and what was read from it."""

    path: str
    manifest: dict[str, Any]
    results: Results
    problems: list[str]


def _compare_study(folders: Sequence[_Folder]) -> dict[str, Any]:
    first, manifest, *_ = folders[0]
    published: dict[str, Any] = {}  # includes rows that were not run
    headings = ("title", "question", "source", "metrics")
    for path, other, *_ in folders:
        keys = [key for key in headings if other[key] != manifest[key]]
        unlike = [f"its {key} differs from the {key} of {shown(first)}" for key in keys]
        numbers = {**other["published"], **{name: row["published"] for name, row in other["rows"].items()}}
        for name, values in numbers.items():
            if published.setdefault(name, values) != values:
                unlike.append(f"row {name} has other published numbers than in {shown(first)}")
        if unlike:
            raise ValueError(f"{shown(path)}: {unlike[0]}: compare it separately")
    folders = _merged(folders)
    rows = _rows(folders)
    results = [folder.results for folder in folders]
    return {
        **{key: manifest[key] for key in ("study", *headings)},
        "charts": _each_once(_charts_of(folder.manifest) for folder in folders),
        "configs": [{name: row["config"] for name, row in (rows | one.manifest["rows"]).items()} for one in folders],
        "notes": _each_once(folder.manifest["notes"] for folder in folders),
        "runs": [_run(folder) for folder in folders],
        "curves": [_curves(rows, found) for found in results],
        "problems": [problem for folder in folders for problem in folder.problems],
        "lines": list(_lines(rows, manifest["metrics"], results)),
        "claims": list(_claims(folders, published)),
    }


def _merged(folders: Sequence[_Folder]) -> list[_Folder]:
    """Folders of one scale with the same settings and other runs as one folder, so that verdicts see all their rows."""
    merged: list[_Folder] = []
    for folder in folders:
        path, manifest, results, problems = folder
        for place, (first, known, others, before) in enumerate(merged):
            shared = known["rows"].keys() & manifest["rows"].keys()
            pairs = [(known["rows"][row], manifest["rows"][row]) for row in shared]
            alike = all(one[key] == two[key] for one, two in pairs for key in ("config", "ranks", "hosts", "kill_rank"))
            same = all(known[key] == manifest[key] for key in ("scale", "set"))
            if alike and same and others.keys().isdisjoint(results):
                seeds = sorted({*known["seeds"], *manifest["seeds"]})
                both = {**known, "rows": {**known["rows"], **manifest["rows"]}, "seeds": seeds}
                both |= {key: _each_once(one.get(key, ()) for one in (known, manifest)) for key in ("notes", "claims")}
                merged[place] = _Folder(f"{first} + {path}", both, {**others, **results}, before + problems)
                break
        else:
            merged.append(folder)
    return merged


def _rows(folders: Sequence[_Folder]) -> dict[str, Any]:
    """Each row as in the folder that is nearest to the published runs: of scale full, then without --set."""
    rows: dict[str, Any] = dict.fromkeys(chain(*(folder.manifest["rows"] for folder in folders)))
    nearest = sorted(folders, key=lambda one: (one.manifest["scale"] != "full", bool(one.manifest["set"])))
    for folder in reversed(nearest):
        rows |= folder.manifest["rows"]
    return rows


def _charts_of(manifest: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What the charts are over. Manifests of older versions do not say it: then the study says it, if it is there."""
    if "charts" in manifest or manifest["study"] not in STUDIES.names():
        return manifest.get("charts", ())
    return STUDIES.build(manifest["study"]).charts


def _each_once(lists: Iterable[Sequence[Any]]) -> list[Any]:
    """The items of all lists in order, without repetitions."""
    items = list(chain(*lists))
    return [item for number, item in enumerate(items) if item not in items[:number]]


def _claims(folders: Sequence[_Folder], published: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The claims of all folders, each once. If one folder says ``a_core_per_rank`` of a claim, it is so for all."""
    claims: dict[tuple[str, str, str], dict[str, Any]] = {}
    for claim in chain(*(folder.manifest["claims"] for folder in folders)):
        known = claims.setdefault((claim["text"], claim["source"], claim["predicate"]), dict(claim))
        known["a_core_per_rank"] |= claim["a_core_per_rank"]
    metric = folders[0].manifest["metrics"][0]
    printed = {row: {0: Outcome(metrics=numbers)} for row, numbers in published.items() if numbers}
    measured = [(_outcomes(folder), _crowded(folder)) for folder in folders]
    for claim in claims.values():
        predicate, of_speed = claim["predicate"], claim["a_core_per_rank"]
        verdicts = [judge(predicate, found, metric, crowded=shared if of_speed else {}) for found, shared in measured]
        on_published = asdict(judge(predicate, printed, metric, published=True))
        yield {**claim, "on_published": on_published, "verdicts": [*map(asdict, verdicts)]}


def _outcomes(folder: _Folder) -> dict[str, dict[int, Outcome]]:
    outcomes: dict[str, dict[int, Outcome]] = {}
    for (row, seed), line in folder.results.items():
        if line["status"] == FINISHED:
            outcomes.setdefault(row, {})[seed] = outcome_of(line)
    return outcomes


def outcome_of(result: Mapping[str, Any]) -> Outcome:
    """A line of the results, for claims. Metrics of a run that diverged count only where they are defined for it."""
    metrics, diverged = result["metrics"], result["diverged"]
    counted = {name: value if not diverged or counts_diverged(name) else None for name, value in metrics.items()}
    return Outcome(metrics=counted, diverged=diverged)


def _crowded(folder: _Folder) -> dict[str, str]:
    """Rows whose ranks outnumbered the cores, each with a sentence that says so."""
    found, rows = {}, folder.manifest["rows"]
    for (row, _), line in folder.results.items():
        if line["status"] == FINISHED and row in rows:
            place, cores, num_hosts = line["place"], line["cores"], rows[row]["hosts"]
            of_hosts = num_hosts > 1 and ("namespaces" in place or "of one machine" not in place)  # they share cores
            ranks = rows[row]["ranks"] // (num_hosts if of_hosts else 1)
            if ranks > cores:
                where = " of each host" if of_hosts else ""
                found[row] = f"{ranks} ranks{where} shared {cores} {'cores' if cores > 1 else 'core'}"
    return found


def _run(folder: _Folder) -> dict[str, Any]:
    finished = [line for line in folder.results.values() if line["status"] == FINISHED]
    failed = [line for line in folder.results.values() if line["status"] == FAILED]
    return {
        "name": folder.path,
        **{key: folder.manifest[key] for key in ("scale", "seeds", "set")},
        "devices": sorted({f"{line['device']}, {line['cores']} cores, torch {line['torch']}" for line in finished}),
        "commits": sorted({line["commit"] or f"ddpcore {line['ddpcore']}" for line in finished}),
        "stand_ins": sorted({line["place"] for line in finished if "of one machine" in line["place"]}),
        "failures": [{key: line[key] for key in ("row", "seed", "error")} for line in failed],
    }


def _of_row(results: Results, row: str) -> list[dict[str, Any]]:
    return [line for (name, _), line in results.items() if name == row]


def _curves(rows: Iterable[str], results: Results) -> dict[str, list[dict[str, list[float]]]]:
    found = {row: [line["curves"] for line in _of_row(results, row) if line.get("curves")] for row in rows}
    return {row: curves for row, curves in found.items() if curves}


def _lines(rows: Mapping[str, Any], metrics: Sequence[str], results: Sequence[Results]) -> Iterator[dict[str, Any]]:
    """A line for the first metric, and for each other metric that was published or measured."""
    for name, row in rows.items():
        lines = [_of_row(found, name) for found in results]
        about = {"row": name, "about": row["about"], "config": row["config"]}
        for metric in metrics:
            known = any(line["metrics"].get(metric) is not None for line in chain(*lines))
            if known or metric in row["published"] or metric == metrics[0]:
                measured = [_spread(one, metric) for one in lines]
                yield {**about, "metric": metric, "published": row["published"].get(metric), "measured": measured}


def _spread(lines: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any] | None:
    """num_seeds that have a number; their mean, std (None for one seed), min and max; num_diverged and num_failed.

    Runs that diverged are excluded, except for metrics that define a value for them.
    """
    if not lines:
        return None
    counted = [line for line in lines if not line["diverged"] or counts_diverged(metric)]
    values = [line["metrics"][metric] for line in counted if line["metrics"].get(metric) is not None]
    return {
        "num_seeds": len(values),
        "mean": statistics.fmean(values) if values else None,
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "min": min(values, default=None),
        "max": max(values, default=None),
        "num_diverged": sum(line["diverged"] for line in lines),
        "num_failed": sum(line["status"] == FAILED for line in lines),
    }


_WARNINGS = {
    "smoke": "only shows that the rows run; its numbers say nothing of the study",
    "cpu": "is shorter where the notes say so",
}


def print_comparison(comparison: dict[str, Any], console: Console | None = None) -> None:
    """Print the rows of a study, then its claims; only :func:`markdown` shows their sources and predicates."""
    parts = [comparison["title"], f"published: {comparison['source']}", *about_runs(comparison)]
    parts.append(_table(*comparison_cells(comparison), num_left=2))
    lacking, claims = "no finished run of ", comparison["claims"]
    checked = [one for one in claims if not all(said["reason"].startswith(lacking) for said in one["verdicts"])]
    if checked:
        heading, rows = claim_cells({**comparison, "claims": checked})
        parts.append(_table([heading[0], *heading[3:]], [[row[0], *row[3:]] for row in rows], num_left=len(heading)))
    if left := len(claims) - len(checked):
        parts.append(f"claims that need rows without a finished run, not shown: {left}; --markdown FILE has them")
    print_parts(console, *parts)


def markdown(comparisons: list[dict[str, Any]], plots: list[str] | None = None) -> str:
    """Comparisons as a Markdown page, with links to their plots (one path for each) if there are any."""
    parts: list[str] = []
    for number, comparison in enumerate(comparisons):
        head = {key: _markdown_text(comparison[key]) for key in ("title", "question", "source")}
        parts += [f"# {head['title']}", head["question"], f"Published: {head['source']}."]
        parts.append("\n".join(f"- {_markdown_text(line)}" for line in about_runs(comparison)))
        parts.append(_markdown_table(*comparison_cells(comparison)))
        if plots:
            parts.append(f"![published and measured]({plots[number]})")
        if comparison["claims"]:
            parts += ["## Claims", _markdown_table(*claim_cells(comparison))]
        if comparison["notes"]:
            parts += ["## Notes", "\n".join(f"- {_markdown_text(note)}" for note in comparison["notes"])]
    return "\n\n".join(parts) + "\n"


def run_label(run: dict[str, Any]) -> str:
    """The name of a run in tables and plots."""
    return f"measured: {run['name']} ({run['scale']})"


def about_runs(comparison: Mapping[str, Any]) -> list[str]:
    """A line for each run of a comparison: where it ran, and what is special about it."""
    lines = []
    for run in comparison["runs"]:
        name, seeds, commits = run["name"], ", ".join(map(str, run["seeds"])), ", ".join(run["commits"])
        machines = "; ".join(run["devices"]) or "nothing finished yet"
        lines.append(f"{name}: scale {run['scale']}, seeds {seeds}; {machines}; {commits}".rstrip("; "))
        if run["scale"] in _WARNINGS:
            lines.append(f"{name}: the scale {run['scale']} {_WARNINGS[run['scale']]}")
        if run["set"]:
            lines.append(f"{name}: set {', '.join(f'{key}={value}' for key, value in run['set'].items())}")
        lines += [f"{name}: {place}" for place in run["stand_ins"]]
        lines += [f"{name}: row {item['row']}, seed {item['seed']} failed: {item['error']}" for item in run["failures"]]
    return lines


def comparison_cells(comparison: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of the table of published and measured numbers."""
    heading = ["row", "metric", "published", *(run_label(run) for run in comparison["runs"])]
    rows = []
    for line in comparison["lines"]:
        published = "-" if line["published"] is None else f"{line['published']:g}"
        rows.append([line["row"], line["metric"], published, *(_measured(cell) for cell in line["measured"])])
    return heading, rows


def _measured(cell: dict[str, Any] | None) -> str:
    """``mean ± std [min, max] n=3``, and how many seeds diverged or failed."""
    if cell is None:
        return "not run"
    parts = []
    if cell["num_seeds"]:
        spread = "" if cell["std"] is None else f" ± {cell['std']:.2g} [{cell['min']:.4g}, {cell['max']:.4g}]"
        parts.append(f"{cell['mean']:.4g}{spread} n={cell['num_seeds']}")
    parts += [f"{cell[f'num_{word}']} {word}" for word in ("diverged", "failed") if cell[f"num_{word}"]]
    return " ".join(parts) or "-"


def claim_cells(comparison: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of the table of claims, with their verdicts."""
    heading = ["claim", "source", "predicate", "published numbers", *(run_label(run) for run in comparison["runs"])]
    rows = []
    for claim in comparison["claims"]:
        published = claim["on_published"] if claim["on_published"]["word"] != "not run" else {"word": "-", "reason": ""}
        all_verdicts = (published, *claim["verdicts"])
        verdicts = [f"{one['word']} ({one['reason']})" if one["reason"] else one["word"] for one in all_verdicts]
        rows.append([*(" ".join(claim[key].split()) for key in ("text", "source", "predicate")), *verdicts])
    return heading, rows


def _table(heading: list[str], rows: list[list[str]], num_left: int) -> Table:
    table = Table()
    for number, cell in enumerate(heading):
        table.add_column(cell_of(cell), justify="left" if number < num_left else "right")
    for row in rows:
        table.add_row(*map(cell_of, row))
    return table


def _markdown_table(heading: list[str], rows: list[list[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(_markdown_text(cell) for cell in line) + " |" for line in lines)


def _markdown_text(text: str) -> str:
    """Text that Markdown shows as it is: no tags, no new lines, no cell ends."""
    return plain(text).replace("<", "&lt;").replace("|", r"\|")
