"""The idioms of ``test_idioms.py`` with strategies that average weights before a step, or once in a while."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import idiom_ranks, ranks
from helpers.each import each
from helpers.idioms.check import check, check_worlds
from helpers.idioms.run import STRATEGIES
from helpers.idioms.table import IDIOMS

pytestmark = pytest.mark.slow
OTHERS = [name for name in STRATEGIES if name != "ssgd"]


@pytest.fixture(scope="module")
def seen() -> list[dict[Any, Any]]:
    return ranks.run("idiom_ranks", 2, more=[["ranks", 1, *OTHERS]] * 2)


@pytest.mark.parametrize("strategy", OTHERS)
@pytest.mark.parametrize("name", IDIOMS)
def test_idiom(name: str, strategy: str, seen: list[dict[Any, Any]]) -> None:
    check_worlds(name, strategy, seen)


# A fifth of the idioms, because each takes seconds of two ranks.
@pytest.mark.parametrize(("num", "world"), [(2, "pg"), (1, "ranks")], ids=["over gloo", "one rank"])
def test_idioms_of_other_worlds(num: int, world: str) -> None:
    found = ranks.run("idiom_ranks", num, more=[[world, 5, *STRATEGIES]] * num)
    run = list(idiom_ranks.runs(world, 5, list(STRATEGIES)))
    assert len(run) > 200
    each(("name", "strategy"), run)(lambda name, strategy: check(name, strategy, world, found))()
