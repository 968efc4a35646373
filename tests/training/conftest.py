"""One thread: for models this small, more threads only cost time."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def one_thread(set_threads: Callable[[int], None]) -> None:
    set_threads(1)
