"""Emulated hosts for the tests of this folder: network namespaces, which the machine must permit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ddpcore.experiments import hosts


@pytest.fixture(scope="session", autouse=True)
def permitted() -> None:
    try:
        hosts.check()
    except hosts.NotPermitted as error:
        pytest.skip(f"network namespaces: {error}")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the ranks have, so that matrix products have the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
