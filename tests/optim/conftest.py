"""One thread by default: the tensors are small, and starting more threads takes longer."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def small_tensors(one_thread: None) -> None:
    """Each file of this folder in one thread."""
