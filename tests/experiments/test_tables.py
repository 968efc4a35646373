"""Published beside measured, from plain values."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ddpcore.experiments.charts import plot_comparison
from ddpcore.experiments.compare import claim_cells, markdown, print_comparison, run_label


def spread(**values: Any) -> dict[str, Any]:
    given = {"num_seeds": 3, "mean": 48.125, "std": 1.5, "min": 47.0, "max": 50.0, "num_diverged": 0, "num_failed": 0}
    return given | values


def comparison(scale: str = "full") -> dict[str, Any]:
    run = {
        "name": "out", "scale": scale, "seeds": [0, 1, 2], "set": {"optimizer.lr": 0.5},
        "devices": ["A Processor, 8 cores"],
        "commits": ["abc"], "stand_ins": ["4 processes of one machine, standing for 2 hosts"],
        "failures": [{"row": "b", "seed": 2, "error": "ValueError: x"}],
    }  # fmt: skip
    line = {"about": "", "config": {}, "metric": "accuracy_pct", "published": 52.71}
    return {
        "study": "s", "title": "A title", "question": "Why?", "source": "Nobody, Table 1", "notes": ["A note."],
        "metrics": ["accuracy_pct"], "charts": [], "runs": [run], "curves": [{}],
        "configs": [{row: {} for row in ("a", "one", "none", "failed")}],
        "lines": [
            {**line, "row": "a", "measured": [spread()]},
            {**line, "row": "one", "published": None, "measured": [spread(num_seeds=1, std=None, num_diverged=2)]},
            {**line, "row": "none", "measured": [None]},
            {**line, "row": "failed", "measured": [spread(num_seeds=0, mean=None, std=None, num_failed=3)]},
        ],
        "claims": [{
            "text": "a |\nb", "source": "Nobody", "predicate": 'mean("a")\n> 1',
            "on_published": {"word": "holds", "reason": ""},
            "verdicts": [{"word": "not run", "reason": "no finished run of none"}],
        }],
    }  # fmt: skip


def printed(*args: Any) -> str:
    file = io.StringIO()
    print_comparison(comparison(*args), Console(file=file, width=400))
    return file.getvalue()


CELLS = [
    ["a", "accuracy_pct", "52.71", "48.12 ± 1.5 [47, 50] n=3"],
    ["one", "accuracy_pct", "-", "48.12 n=1 2 diverged"],
    ["none", "accuracy_pct", "52.71", "not run"],
    ["failed", "accuracy_pct", "52.71", "3 failed"],
]


def test_terminal() -> None:
    """A published number never stands in the measured column, brackets are kept, and a pipe has no width."""
    text = printed()
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines()]
    for row in CELLS:
        assert row in cells
    for part in ("A title", "Nobody, Table 1", "A Processor", "abc", "set optimizer.lr=0.5", "standing for 2 hosts"):
        assert part in text
    assert "row b, seed 2 failed: ValueError: x" in text
    assert "not shown: 1; --markdown FILE has them" in text and "no finished run of none" not in text


def test_a_claim_without_published_numbers_has_none() -> None:
    compared = comparison()
    compared["claims"][0]["on_published"] = {"word": "not run", "reason": "no finished run of a"}
    assert claim_cells(compared)[1][0][3:] == ["-", "not run (no finished run of none)"]


def test_a_claim_that_one_folder_can_check_is_shown() -> None:
    both, file = comparison(), io.StringIO()
    both["runs"] *= 2
    both["claims"][0]["verdicts"].append({"word": "holds", "reason": "n=3"})
    print_comparison(both, Console(file=file, width=400))
    assert "holds (n=3)" in file.getvalue() and "not shown" not in file.getvalue()


@pytest.mark.parametrize(
    ("scale", "says"), [("smoke", "nothing of the study"), ("cpu", "is shorter where"), ("full", None)]
)
def test_shortened_runs_say_so(scale: str, says: str | None) -> None:
    for text in (printed(scale), markdown([comparison(scale)])):
        assert ("the scale" in text) == (says is not None)
        assert says is None or says in text


def test_markdown() -> None:
    text = markdown([comparison()], ["plot.svg"])
    lines = text.splitlines()
    for row in CELLS:
        assert "| " + " | ".join(row) + " |" in lines
    assert r'| a \| b | Nobody | mean("a") > 1 | holds | not run (no finished run of none) |' in lines
    assert "![published and measured](plot.svg)" in lines
    assert lines[0] == "# A title"
    assert "- A note." in lines


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = comparison()
    path = tmp_path / "plot.svg"
    plot_comparison(result, path, [run_label(run) for run in result["runs"]])
    text = path.read_text()
    for part in ("A title", "published", "measured: out (full)", "accuracy_pct"):
        assert f"<!-- {part} -->" in text


def test_names_are_text_in_markdown_and_in_the_terminal() -> None:
    name = "<script>a</script> | b\n# c\x1b[2J"
    changed = {**comparison(), "title": name, "notes": [name]}
    text = markdown([changed])
    assert "<script>" not in text and "\x1b" not in text and "\n# c" not in text
    assert r"# &lt;script>a&lt;/script> \| b\n# c\x1b[2J" in text.splitlines()
    out = io.StringIO()
    print_comparison(changed, Console(file=out))
    assert "\x1b" not in out.getvalue() and r"\x1b[2J" in out.getvalue()
