"""The words in the drawing of a bench result."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ddpcore.report.benches import plot_bench


def words_drawn(result: dict[str, Any], folder: Path) -> set[str]:
    """All texts of the SVG file that ``--plot`` writes; skips the rest of the test without matplotlib."""
    pytest.importorskip("matplotlib")
    plot_bench(result, folder / "out.svg")
    return set(re.findall(r"<!-- (.*?) -->", (folder / "out.svg").read_text()))
