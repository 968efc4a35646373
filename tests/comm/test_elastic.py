"""Ranks that die, against virtual learners that die by the same script: bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import elastic_ranks, ranks
from helpers.elastic_ranks import Ended, Trial

pytestmark = pytest.mark.slow

SIGKILL = 9
GOES_ON = [trial for trial in elastic_ranks.TRIALS if trial.world_size - len(trial.deaths) > 1]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank of each trial ends with."""
    path = tmp_path_factory.mktemp("elastic") / "trials.pt"
    ranks.succeeds("-m", "helpers.elastic_ranks", "main", path)
    return torch.load(path, weights_only=False)


def living(trial: Trial, real: dict[str, list[Any]]) -> dict[int, Ended]:
    """What the ranks that are left end with. The others were killed."""
    ended = real[str(trial)]
    dead = {rank for rank, _, _ in trial.deaths}
    assert [ended[rank] for rank in sorted(dead)] == [SIGKILL] * len(dead)
    left = {rank: one for rank, one in enumerate(ended) if rank not in dead}
    assert all(isinstance(one, Ended) for one in left.values()), left
    return left


@pytest.mark.parametrize("trial", GOES_ON, ids=str)
def test_same_bits_as_the_script_of_virtual_learners(trial: Trial, real: dict[str, list[Any]]) -> None:
    """The living end with the bits of virtual learners that die at the same operations: weights, losses, averages."""
    left = living(trial, real)
    first = next(iter(left.values()))
    torch.set_num_threads(1)
    virtual = elastic_ranks.train(trial, script=first.changes)
    assert virtual.members == first.members == tuple(left)
    assert [(one.operation, one.members) for one in virtual.changes] == [
        (one.operation, one.members) for one in first.changes
    ]
    for rank, one in left.items():
        assert one.changes == first.changes
        assert torch.equal(one.result.weights[0], virtual.result.weights[rank])
        assert torch.equal(one.result.losses[:, 0], virtual.result.losses[:, rank])
        assert torch.equal(one.result.average, virtual.result.average)
        assert one.result.consensus == virtual.result.consensus
        assert one.found == [found for found in virtual.found if found.learner == rank]
        if one.result.shares is not None:
            assert torch.equal(one.result.shares, virtual.result.shares)


@pytest.mark.parametrize("trial", [trial for trial in GOES_ON if trial.transport == "shm"], ids=str)
def test_the_operation_of_a_death(trial: Trial, real: dict[str, list[Any]]) -> None:
    """A rank that dies before it publishes its row is not in that operation; one that has published it is."""
    changes = next(iter(living(trial, real).values())).changes
    expected: dict[int, set[int]] = {}
    for rank, operation, late in trial.deaths:
        expected.setdefault(operation + late, set()).add(rank)
    assert {change.operation: set(change.lost) for change in changes} == expected
    assert all(change.step is None or change.step >= 0 for change in changes)


@pytest.mark.parametrize("trial", [trial for trial in GOES_ON if trial.transport == "pg"], ids=str)
def test_no_later_operation_has_a_rank_that_died(trial: Trial, real: dict[str, list[Any]]) -> None:
    """Over gloo, an operation that a death interrupts is done again without the dead, unless all had received it.

    SSGD begins an average for each bucket before it waits. So a death may interrupt all operations that are in progress
    then, which are the same on all ranks.
    """
    first = next(iter(living(trial, real).values()))
    changes = first.changes
    when = {rank: change.operation for change in changes for rank in change.lost}
    for rank, operation, late in trial.deaths:
        assert first.oldest[operation] <= when[rank] <= operation + late


def test_one_rank_says_what_was_lost(real: dict[str, list[Any]]) -> None:
    left = living(Trial("awc_ring", 4, ((2, 9, False),)), real)
    said = "ddpcore: learner 2 is gone, and what it held is lost: 3 learners go on from step 2, operation 9: [0, 1, 3]"
    assert [one.said for one in left.values()] == [[said], [], []]


@pytest.mark.parametrize("trial", [trial for trial in elastic_ranks.TRIALS if trial not in GOES_ON], ids=str)
def test_fewer_than_two_left_is_an_error(trial: Trial, real: dict[str, list[Any]]) -> None:
    last = real[str(trial)][0]
    assert "TooFewLeft: learner 2 is gone" in last
    assert "start again from a checkpoint" in last


@pytest.mark.parametrize("trial", elastic_ranks.JOINS, ids=str)
def test_a_rank_that_joins_has_the_bits_of_the_script(trial: Trial, real: dict[str, list[Any]]) -> None:
    """All ranks, those that joined among them, end with the bits of virtual learners that join after the same step.

    Under SSGD, which averages no weights, they end with the bits of each other.
    """
    ended = [one for one in real[str(trial)] if isinstance(one, Ended)]
    assert len(ended) == trial.world_size - len(trial.deaths) + trial.num_newcomers, real[str(trial)]
    script = ended[0].changes
    assert sum(len(change.joined) for change in script) == trial.num_newcomers
    torch.set_num_threads(1)
    virtual = elastic_ranks.train(trial, script=script)
    for one in ended:
        assert one.members == virtual.members
        assert one.changes == script, "also those before it has joined"
        assert torch.equal(one.result.weights[0], virtual.result.weights[one.mine])
        if trial.strategy in ("ssgd", "noisy"):
            assert torch.equal(one.result.weights, ended[0].result.weights)
        assert torch.equal(one.result.losses[:, 0], virtual.result.losses[one.first_step :, one.mine])
        assert torch.equal(one.result.average, virtual.result.average)
        assert one.result.consensus == virtual.result.consensus


@pytest.mark.parametrize("trial", elastic_ranks.REFUSED, ids=str)
def test_a_rank_that_cannot_join_is_told_why(trial: Trial, real: dict[str, list[Any]]) -> None:
    """The ranks of the run go on without it."""
    *others, newcomer = real[str(trial)]
    assert all(isinstance(one, Ended) and one.changes == () for one in others), others
    assert newcomer.startswith("ValueError: the run does not let this rank join: ")
    reasons = {"stale": "an exchange is in progress", "scaled": "the scale of the gradient scaler may change"}
    assert reasons.get(trial.strategy, "strategy is SlowMo") in newcomer
    assert newcomer.count("\n") == 1
