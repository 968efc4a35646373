"""``llms.txt`` names every page of the documentation once, each with what the page is for."""

from __future__ import annotations

import re

from helpers.ranks import ROOT

LINE = re.compile(r"- \[.+?\]\(([\w/.]+)\): \S.{10,}")


def test_every_page_has_one_line() -> None:
    lines = [line for line in (ROOT / "llms.txt").read_text().splitlines() if line.startswith("- ")]
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if match is None]
    named = sorted(match[1] for match in found if match is not None)
    docs = ROOT / "docs"
    pages = [
        *docs.glob("*.md"),
        *docs.glob("tutorials/*.md"),
        *docs.glob("reference/*.md"),
        docs / "results" / "README.md",
    ]
    others = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md"]
    assert named == sorted([*(str(page.relative_to(ROOT)) for page in pages), *others])
