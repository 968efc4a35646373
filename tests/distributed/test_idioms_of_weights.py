"""The idioms of ``test_idioms.py`` with strategies that average weights before a step, or once in a while."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import ranks
from helpers.each import each
from helpers.idioms.check import check, check_worlds
from helpers.idioms.run import STRATEGIES
from helpers.idioms.table import IDIOMS, worlds

pytestmark = pytest.mark.slow
ALL = [(name, strategy) for name in IDIOMS for strategy in STRATEGIES]


@pytest.fixture(scope="module")
def seen() -> list[dict[Any, Any]]:
    return ranks.run("idiom_ranks", 2, more=[["all", "dpsgd", "local_sgd"]] * 2)


@pytest.mark.parametrize(("name", "strategy"), [case for case in ALL if case[1] != "ssgd" and worlds(*case)])
def test_idiom(name: str, strategy: str, seen: list[dict[Any, Any]]) -> None:
    check_worlds(name, strategy, seen)


def test_idioms_of_one_rank() -> None:
    found = ranks.run("idiom_ranks", 1, more=[["all", *STRATEGIES]])
    run = [case for case in ALL if worlds(*case, num_ranks=1)]
    assert len(run) > 80
    each(("name", "strategy"), run)(lambda name, strategy: check(name, strategy, "ranks", found))()


def test_each_idiom_runs_in_its_worlds_with_each_strategy() -> None:
    """A third of them in each pair of a world and a strategy at least, and an eighteenth over gloo."""
    for name, one in IDIOMS.items():
        assert {world for strategy in STRATEGIES for world in worlds(name, strategy)} >= {*one.worlds}
    for strategy in STRATEGIES:
        for world, possible, part in (("ranks", "ranks", 3), ("virtual", "virtual", 3), ("pg", "ranks", 18)):
            run = sum(world in worlds(name, strategy) for name in IDIOMS)
            assert run > sum(possible in one.worlds for one in IDIOMS.values()) / part, (strategy, world)
