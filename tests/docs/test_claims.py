"""The table of all claims is what the committed results say."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_is_that_of_the_results() -> None:
    assert (DOCS / "results" / "README.md").read_text() == runpy.run_path(str(DOCS / "claims.py"))["table"]()
