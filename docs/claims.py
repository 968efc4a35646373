"""Writes the table of all claims from the committed results: ``PYTHONPATH=. python docs/claims.py``."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ddpcore.experiments.compare import compare

RESULTS = Path(__file__).parent / "results"
HEAD = """# All claims

First how many verdicts each study has, then its claims. Each line is a claim of a published document or of this
project, and what the runs here say about it. `n` is the smallest number of seeds behind the verdict: one seed proves
nothing. *Published* applies the same predicate to the document's own numbers, where it has them. *Within the spread*:
it holds of the means, and not with each seed. *Void*: a claim about the speed of ranks that outnumbered the cores. The
page of a study has the predicates and explains the numbers. *Scale* names settings that the runs changed.
`PYTHONPATH=. python docs/claims.py` writes this page.
"""
COLUMNS = ("claim", "source", "published", "verdict", "n", "scale")
WORDS = ("holds", "holds, within the spread", "does not hold", "void", "not run")


def folders_of(study: Path) -> list[Path]:
    """The folders with results of a study: its own, or one for each scale."""
    return sorted(path.parent for path in study.glob("**/manifest.json"))


def rows_of(study: Path) -> list[list[str]]:
    """One row for each claim and each scale that has a verdict; without any, one row with the reason."""
    (comparison,) = compare(folders_of(study))
    rows = []
    for claim in comparison["claims"]:
        found = list(zip(comparison["runs"], claim["verdicts"], strict=True))
        judged = [
            (run, verdict) for run, verdict in found if verdict["word"] != "not run"
        ]
        for run, verdict in judged or found[:1]:
            num_seeds = (
                verdict["reason"].removeprefix("n=")
                if verdict["reason"].startswith("n=")
                else "-"
            )
            settings = [f"{key}={value}" for key, value in run["set"].items()]
            where = ", ".join([run["scale"], *settings])
            said = [
                claim["on_published"]["word"],
                verdict["word"],
                num_seeds,
                where,
            ]
            rows.append([claim["text"], claim["source"], *said])
    return sorted(rows, key=lambda row: row[3] == "not run")


def lines_of(*rows: Sequence[str]) -> str:
    """A table in Markdown; the first row is its head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
        for line in lines
    )


def counted(rows: Sequence[Sequence[str]]) -> list[str]:
    """How many rows have each verdict."""
    counts = Counter(row[3] for row in rows)
    return [str(counts[word] or "-") for word in WORDS]


def table() -> str:
    """The page: how many verdicts each study has, then the claims of each."""
    studies = {
        study.name: rows_of(study)
        for study in sorted(RESULTS.iterdir())
        if study.is_dir()
    }
    studies = {name: rows for name, rows in studies.items() if rows}
    everything = [row for rows in studies.values() for row in rows]
    counts = [[f"[{name}](#{name})", *counted(rows)] for name, rows in studies.items()]
    parts = [
        HEAD,
        lines_of(
            ["study", *WORDS], *counts, [f"all {len(everything)}", *counted(everything)]
        ),
    ]
    for name, rows in studies.items():
        parts.append(f"## [{name}]({name}/README.md)\n\n{lines_of(COLUMNS, *rows)}")
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    (RESULTS / "README.md").write_text(table())
