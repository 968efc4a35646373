"""Writes the table of all claims from the committed results: ``PYTHONPATH=. python docs/claims.py``."""

from collections import Counter
from pathlib import Path
from typing import Any

from ddpcore.experiments.compare import compare

RESULTS = Path(__file__).parent / "results"
HEAD = """# All claims

Each line is a claim of a published document or of this project, and what the runs here say about it. `n` is the
smallest number of seeds behind the verdict: one seed proves nothing. *Published* applies the same predicate to the
document's own numbers, where it has them. *Within the spread*: it holds of the means, and not with each seed.
*Void*: a claim about the speed of ranks that outnumbered the cores. The page of a study has the predicates and
explains the numbers.
`PYTHONPATH=. python docs/claims.py` writes this table.
"""
COLUMNS = ("study", "claim", "source", "published", "verdict", "n", "scale")


def folders_of(study: Path) -> list[Path]:
    """The folders with results of a study: its own, or one for each scale."""
    return sorted(path.parent for path in study.glob("**/manifest.json"))


def rows_of(study: Path) -> list[list[str]]:
    """One row for each claim and each scale that has a verdict; without any, one row with the reason."""
    (comparison,) = compare(folders_of(study))
    rows = []
    for claim in comparison["claims"]:
        found = list(zip(comparison["runs"], claim["verdicts"], strict=True))
        judged = [(run, verdict) for run, verdict in found if verdict["word"] != "not run"]
        for run, verdict in judged or found[:1]:
            num_seeds = verdict["reason"].removeprefix("n=") if verdict["reason"].startswith("n=") else "-"
            said = [claim["on_published"]["word"], verdict["word"], num_seeds, run["scale"]]
            rows.append([f"[{study.name}]({study.name}/README.md)", claim["text"], claim["source"], *said])
    return rows


def table() -> str:
    """The page."""
    rows = [row for study in sorted(RESULTS.iterdir()) if study.is_dir() for row in rows_of(study)]
    counts = Counter(row[COLUMNS.index("verdict")] for row in rows)
    said = ", ".join(
        f"{counts[word]} {word}"
        for word in ("holds", "holds, within the spread", "does not hold", "void", "not run")
        if counts[word]
    )
    lines: list[Any] = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"{HEAD}\n{len(rows)} verdicts: {said}.\n\n{text}\n"


if __name__ == "__main__":
    (RESULTS / "README.md").write_text(table())
