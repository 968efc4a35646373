"""The words in the drawing of a bench result."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ddpcore.bench.commands import kind_of


def words_drawn(result: dict[str, Any], folder: Path) -> set[str]:
    """All texts of the SVG file that ``--plot`` writes; skips the rest of the test without matplotlib."""
    pytest.importorskip("matplotlib")
    kind = kind_of(result)
    assert kind is not None
    kind.draw(result, folder / "out.svg")
    return set(re.findall(r"<!-- (.*?) -->", (folder / "out.svg").read_text()))
