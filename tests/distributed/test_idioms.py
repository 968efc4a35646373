"""Ordinary idioms of PyTorch around ``distribute``: the weights of the plain loop, or an error that names the cause.

Here averages of gradients, on which hooks, scalers and closures act. ``test_idioms_of_weights.py`` averages weights.
"""

from __future__ import annotations

from typing import Any

import pytest

from helpers import ranks
from helpers.idioms.check import check_worlds
from helpers.idioms.table import FAST, IDIOMS


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    """Of all idioms, or of the fast ones, as they are selected."""
    which = "all" if ranks.has_slow_items(request) else "fast"
    return ranks.run("idiom_ranks", 2, more=[[which, "ssgd"]] * 2)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in IDIOMS]
)
def test_idiom(name: str, seen: list[dict[Any, Any]]) -> None:
    check_worlds(name, "ssgd", seen)
