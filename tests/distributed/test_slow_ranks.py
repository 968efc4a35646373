"""Which rank is slow: four real ranks on a clock of the test, and the rule that names a rank."""

from __future__ import annotations

from typing import Any

import pytest

from ddpcore.distributed.phases import PHASES, slow_ranks
from helpers import ranks
from helpers.each import each
from helpers.slow_ranks import MAKERS


@pytest.fixture(scope="module")
def found() -> Any:
    everyone = ranks.run("slow_ranks", 4)
    assert all(one == everyone[0] for one in everyone)  # every rank says the same
    return everyone[0]


@pytest.mark.slow
@each("name", MAKERS)
def test_the_rank_and_its_phase_are_named(name: str, found: Any) -> None:
    """200 ms in one pass of rank 1, while all other ranks wait for it and have steps of the same length."""
    for place, phase in (("forward", PHASES[0]), ("backward", PHASES[1]), ("rest", PHASES[2])):
        (one,), later = found[name, place]
        assert (one.rank, one.phase) == (1, phase)
        assert one.excess == pytest.approx(0.2, abs=1e-9)
        assert one.waiting == pytest.approx(0.2, rel=0.3)  # with ddp the last step does not wait
        assert f"rank 1 is slow in the {phase}: 200 ms" in str(one)
        assert later == []  # no step since the last call


@each("name", MAKERS)
def test_it_is_silent_without_a_cause(name: str, found: Any) -> None:
    """Nobody is slow; or a rank loses a millisecond of eleven."""
    assert found[name, "nobody"][0] == found[name, "a little"][0] == []


@each("name", MAKERS)
def test_two_slow_ranks(name: str, found: Any) -> None:
    assert [one.rank for one in found[name, "two"][0]] == [1, 2]


def own(*sums: float) -> dict[int, tuple[float, ...]]:
    return {rank: (0.1, total - 0.2, 0.1) for rank, total in enumerate(sums)}


@each(
    ("sums", "waits", "named"),
    [
        ((1.0, 1.5, 1.0, 1.0), (0.5, 0.0, 0.5, 0.5), [1]),
        ((1.0, 1.5, 1.0, 1.0), (0.7, 0.2, 0.7, 0.7), []),  # 71 % of the waiting: the rest is the network's
        ((1.0, 1.5, 1.0, 1.0), (0.62, 0.12, 0.62, 0.62), [1]),  # 81 %
        ((1.0, 1.1, 1.0, 1.0), (0.1, 0.0, 0.1, 0.1), []),  # 9 % of a step
        ((1.0, 1.2, 1.4, 1.0), (0.4, 0.2, 0.0, 0.4), [2]),
        ((1.5, 1.5, 1.5, 1.0), (0.0, 0.0, 0.0, 0.5), []),  # one fast rank is no slow one
        ((1.0, 2.0), (1.0, 0.0), [1]),
    ],
)
def test_the_rule(sums: Any, waits: Any, named: list[int]) -> None:
    found = slow_ranks(own(*sums), dict(enumerate(waits)))
    assert [one.rank for one in found] == named
    assert all(one.phase == PHASES[1] for one in found)


def test_a_copy_of_the_model_counts_nothing(found: Any) -> None:
    """``copy.deepcopy`` and ``pickle`` of a rank's model."""
    assert found["copies"] == [True, True]
