"""The files whose tests take longest: ``tests/heavy.txt`` has the seconds of each."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent


def files() -> dict[str, int]:
    """The seconds of each file of the list, by its name below ``tests/``."""
    lines = (TESTS / "heavy.txt").read_text().splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return {name: int(seconds) for seconds, name in rows}


def first(items: list[pytest.Item]) -> list[pytest.Item]:
    """The items with the heaviest files first: a worker that begins with one last works on alone.

    The tests of a file stay together, and files without an entry keep their order.
    """
    seconds = {TESTS / name: number for name, number in files().items()}
    return sorted(items, key=lambda item: -seconds.get(item.path, 0))
