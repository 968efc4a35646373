"""The order of the test files: what takes longest comes first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from helpers import heavy


def test_each_file_of_the_list_exists_and_stands_once() -> None:
    names = [line.split()[1] for line in (heavy.TESTS / "heavy.txt").read_text().splitlines()[1:]]
    assert names == list(heavy.files()), "a file stands twice, or the first line is no comment"
    assert [name for name in names if not (heavy.TESTS / name).is_file()] == []


def test_heavy_files_come_first() -> None:
    """Then those without an entry, in their order."""
    light = ["test_a.py", "test_b.py"]
    heaviest, *_, least = sorted(heavy.files(), key=heavy.files().__getitem__, reverse=True)
    items: list[Any] = [SimpleNamespace(path=heavy.TESTS / name) for name in (light[0], least, light[1], heaviest)]
    assert [one.path.name for one in heavy.first(items)] == [heaviest.split("/")[-1], least.split("/")[-1], *light]


def test_this_run_has_that_order(request: pytest.FixtureRequest) -> None:
    assert request.session.items == heavy.first(request.session.items)
