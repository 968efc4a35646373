"""Published and measured numbers side by side, as tables for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from ddpcore.display.table import cell_of, print_parts
from ddpcore.storage.limits import plain

_WARNINGS = {
    "smoke": "only shows that the rows run; its numbers say nothing of the study",
    "cpu": "is shorter where the notes say so",
}


def print_comparison(comparison: dict[str, Any], console: Console | None = None) -> None:
    """Print the rows of a study, then its claims; only :func:`markdown` shows their sources and predicates."""
    parts = [comparison["title"], f"published: {comparison['source']}", *about_runs(comparison)]
    parts.append(_table(*comparison_cells(comparison), num_left=2))
    checked = [claim for claim in comparison["claims"] if not _lacks_rows(claim)]
    if checked:
        heading, rows = claim_cells({**comparison, "claims": checked})
        parts.append(_table([heading[0], *heading[3:]], [[row[0], *row[3:]] for row in rows], num_left=len(heading)))
    if left := len(comparison["claims"]) - len(checked):
        parts.append(f"claims that need rows without a finished run, not shown: {left}; --markdown FILE has them")
    print_parts(console, *parts)


def _lacks_rows(claim: Mapping[str, Any]) -> bool:
    """Whether every folder lacks a finished run of a row that the claim names."""
    return all(verdict["reason"].startswith("no finished run of ") for verdict in claim["verdicts"])


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
        verdicts = [
            f"{verdict['word']} ({verdict['reason']})" if verdict["reason"] else verdict["word"]
            for verdict in (claim["on_published"], *claim["verdicts"])
        ]
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
