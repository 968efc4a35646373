"""Emulated hosts for the tests of this folder: network namespaces, which the machine must permit."""

from __future__ import annotations

import pytest

from helpers import hosts


@pytest.fixture(scope="session", autouse=True)
def permitted() -> None:
    try:
        hosts.check()
    except hosts.NotPermitted as error:
        pytest.skip(f"network namespaces: {error}")


@pytest.fixture(scope="module", autouse=True)
def as_ranks_have(one_thread: None) -> None:
    """So that matrix products have the same bits."""
