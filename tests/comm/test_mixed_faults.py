"""Ranks of two hosts of which one fails: every error is one line that names it. See helpers/mixed_fault_ranks.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from helpers import mixed_fault_ranks as trials
from helpers import ranks

pytestmark = pytest.mark.slow

Outcome = list[tuple[int, str]]  # of each rank: exit status, output


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    before = ranks.names_in_shared_memory()
    path = tmp_path_factory.mktemp("mixed") / "outcomes.pt"
    ranks.succeeds("-m", "helpers.mixed_fault_ranks", path)
    assert ranks.names_in_shared_memory() <= before
    return torch.load(path)


@pytest.fixture
def outcome(outcomes: dict[str, Outcome]) -> Callable[..., list[str]]:
    """What each rank says. Rank 3 is the one that fails."""
    return lambda function, *arguments: [
        output for _, output in outcomes["-".join([function.__name__, *map(str, arguments)])]
    ]


def test_a_rank_of_the_other_host_that_died_is_named(outcome: Callable[..., list[str]]) -> None:
    """By rank 0, which waits for it, and by rank 1, which waits for rank 0; rank 2 sees it by shared memory."""
    first, second, third, lost = outcome(trials.exchanges, 4, "dies", 60.0, 3)
    assert lost == ""
    text = "RuntimeError: the exchange of 5000 float32 at step 3 failed on rank 0: a rank of [3] died, left"
    assert first.startswith(text) and second == first
    assert third.startswith("RuntimeError: rank 3 is gone")
    assert [said.count("\n") for said in (first, second, third)] == [1, 1, 1]


def test_a_late_rank_is_named(outcome: Callable[..., list[str]]) -> None:
    first, second, third, _ = outcome(trials.exchanges, 4, "late", 1.5, 3)
    text = "the exchange of 5000 float32 at step 3 failed on rank 0: a rank of [3] did not come within 1.5 s"
    assert first.startswith(f"RuntimeError: {text}")
    assert third.startswith("RuntimeError: rank 3 did not arrive within 1.5 s at operation")
    assert second.startswith("RuntimeError: ") and second.count("\n") == 1  # it waits for rank 0 as long as that for 3


def test_an_average_names_the_ranks(outcome: Callable[..., list[str]]) -> None:
    for rank, said in enumerate(outcome(trials.averages, 4)[:3]):
        assert said.startswith(f"RuntimeError: an average of 500000 float32 at step 2 failed on rank {rank}: a rank of")
        assert said.count("\n") == 1


def test_ranks_of_a_host_that_cannot_share_memory(outcome: Callable[..., list[str]]) -> None:
    why = "shared memory does not connect these ranks: rank 3 cannot open the memory of another (not yours)"
    for said in outcome(trials.is_refused, 4):
        assert said.splitlines() == [
            f"torch.distributed, gloo ({why}: use --transport pg)",
            f"Unreachable: {why}: use --transport pg",
        ]


def test_rows_that_change_without_waiting(outcome: Callable[..., list[str]]) -> None:
    assert outcome(trials.waits_for_nobody, 4) == ["mixed True\n"] * 4


def test_memory_is_freed(outcome: Callable[..., list[str]]) -> None:
    assert outcome(trials.frees, 4) == ["freed\n"] * 4
    assert outcome(trials.ends_in_an_exchange, 4) == ["True (0, 0)\n"] * 4
