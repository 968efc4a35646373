"""Ordinary idioms of PyTorch around ``distribute``: the weights of the plain loop, or an error that names the cause.

Here averages of gradients, on which hooks, scalers and closures act. ``test_idioms_of_weights.py`` averages weights.
"""

from __future__ import annotations

from typing import Any

import pytest

from helpers import ranks
from helpers.idioms.check import check_worlds
from helpers.idioms.table import IDIOMS


@pytest.fixture(scope="module")
def seen() -> list[dict[Any, Any]]:
    return ranks.run("idiom_ranks", 2, more=[["ranks", 1, "ssgd"]] * 2)


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom(name: str, seen: list[dict[Any, Any]]) -> None:
    check_worlds(name, "ssgd", seen)
