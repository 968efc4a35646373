"""One thread: for models this small, more threads only cost time."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def as_ranks_have(one_thread: None) -> None:
    """One thread."""
