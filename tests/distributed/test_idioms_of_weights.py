"""The idioms of ``test_idioms.py`` with strategies that average weights before a step, or once in a while."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import ranks
from helpers.idioms.check import check_worlds
from helpers.idioms.run import STRATEGIES
from helpers.idioms.table import IDIOMS

pytestmark = pytest.mark.slow
OTHERS = [name for name in STRATEGIES if name != "ssgd"]


@pytest.fixture(scope="module")
def seen() -> list[dict[Any, Any]]:
    return ranks.run("idiom_ranks", 2, more=[OTHERS] * 2)


@pytest.mark.parametrize("strategy", OTHERS)
@pytest.mark.parametrize("name", IDIOMS)
def test_idiom(name: str, strategy: str, seen: list[dict[Any, Any]]) -> None:
    check_worlds(name, strategy, seen)
