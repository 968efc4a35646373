"""Faults of one or all ranks in training: they do no harm, or an error names them. See helpers/fault_ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers import fault_ranks as trials
from helpers import ranks

pytestmark = pytest.mark.slow

Outcome = list[tuple[int, str]]  # of each rank: exit status, output


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    path = tmp_path_factory.mktemp("faults") / "outcomes.pt"
    ranks.succeeds("-m", "helpers.fault_ranks", path)
    return torch.load(path)


@pytest.fixture
def outcome(outcomes: dict[str, Outcome]) -> Callable[..., Outcome]:
    return lambda function, *arguments: outcomes["-".join([function.__name__, *map(str, arguments)])]


def named(function: Any) -> list[Any]:
    return [pytest.param(one, id="-".join(map(str, one[2:]))) for one in trials.TRIALS if one[0] is function]


@pytest.mark.parametrize("trial", named(trials.backward_dies))
def test_a_failed_backward_pass_has_no_later_effect(trial: tuple[Any, ...], outcome: Callable[..., Outcome]) -> None:
    assert outcome(*trial) == [(0, "right\n")] * 2


def test_a_step_that_one_rank_leaves_out_is_named(outcome: Callable[..., Outcome]) -> None:
    for rank, (_, output) in enumerate(outcome(trials.backward_dies_on_one, 2)):
        assert f"rank {1 - rank} came to operation" in output
        assert "an average of 32 float32 at step 1 at byte 0" in output
        assert "of the gather of" in output  # the other rank compares learners after its average


@pytest.mark.parametrize("trial", named(trials.abandons))
def test_abandoned_exchanges_free_their_buffers(trial: tuple[Any, ...], outcome: Callable[..., Outcome]) -> None:
    assert outcome(*trial) == [(0, "True\n")] * 2


@pytest.mark.parametrize("trial", named(trials.dies))
def test_a_call_of_a_process_group_that_fails_is_named(trial: tuple[Any, ...], outcome: Callable[..., Outcome]) -> None:
    """In one line: the call and its step, this rank and its peers."""
    (status, output), lost = outcome(*trial)
    assert lost == (-9, "")
    assert status == 0
    text = trials.DEATHS[trial[3]].format(step=2, rows=1000 if trial[2] == "grid" else 500)
    assert output.startswith(f"RuntimeError: {text} failed on rank 0: a rank of [1] died, left")
    assert output.count("\n") == 1


@pytest.mark.parametrize("trial", named(trials.dies_in_training))
def test_a_rank_that_dies_in_training_is_named_with_its_step(
    trial: tuple[Any, ...], outcome: Callable[..., Outcome]
) -> None:
    (_, output), lost = outcome(*trial)
    assert lost == (-9, "")
    text = "an average of 32 float32 at step 2"
    assert f"RuntimeError: {text} failed on rank 0" in output or ("rank 1 is gone" in output and text in output)
    assert output.count("\n") == 1


@pytest.mark.parametrize("trial", named(trials.goes_on_backwards))
def test_later_backward_passes_raise_again_after_a_death(
    trial: tuple[Any, ...], outcome: Callable[..., Outcome]
) -> None:
    """A kept graph runs no forward pass, which would clean up. The rank must neither hang nor continue alone."""
    (status, output), lost = outcome(*trial)
    assert lost == (-9, "")
    assert status == 0
    lines = output.splitlines()
    assert len(lines) == 3
    assert all("rank 1 is gone" in line or "a rank of [1] died" in line for line in lines)


@pytest.mark.parametrize("trial", named(trials.trains_something_else))
def test_settings_that_differ_are_named(trial: tuple[Any, ...], outcome: Callable[..., Outcome]) -> None:
    for _, output in outcome(*trial):
        assert output.startswith("ValueError: ranks do not train the same: ")
        assert trials.DIFFERENCES[trial[2]] in output


@pytest.mark.parametrize("strategy", trials.LATE)
@pytest.mark.parametrize("transport", ["shm", "pg"])
def test_a_late_rank_is_named_with_its_step(transport: str, strategy: str, outcome: Callable[..., Outcome]) -> None:
    """After distribute(timeout=), which the error repeats: what waited, for whom, at which step."""
    output = outcome(trials.is_late, 2, transport, strategy, 1.5)[0][1]
    what = {"ssgd": "an average of 32 float32 at step 2", "dpsgd": "the exchange of 32 float32 at step 2"}[strategy]
    whom = "rank 1 did not arrive within 1.5 s" if transport == "shm" else "a rank of [1] did not come within 1.5 s"
    assert output.startswith("RuntimeError: ")
    assert what in output
    assert whom in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("trial", named(trials.has_fewer_batches))
def test_a_call_outside_a_step_meets_no_average_of_a_step(
    trial: tuple[Any, ...], outcome: Callable[..., Outcome]
) -> None:
    """A rank that has no batch left makes a collective call, and the other one is in its next step: both say it."""
    early, late = outcome(*trial)
    for (_, output), what in ((early, trials.CALLS[trial[-1]]), (late, "at step 2")):
        assert output.startswith("RuntimeError: ")
        assert what in output
        assert output.count("\n") == 1


@pytest.mark.parametrize("trial", named(trials.mixes_in_own_calls))
def test_calls_of_the_program_meet_no_message_of_a_step(
    trial: tuple[Any, ...], outcome: Callable[..., Outcome]
) -> None:
    """Over gloo both would take the other's numbers without a word, if they used one group."""
    assert outcome(*trial) == [(0, "right\n")] * 2


def test_ranks_that_make_two_calls_of_one_size_in_another_order(outcome: Callable[..., Outcome]) -> None:
    """Their numbers would be added to each other's, over gloo without a word."""
    average, product = "an average of 8192 float32", "a sum of 8192 float32 over ranks"
    outputs = [output for _, output in outcome(trials.calls_in_another_order, 2)]
    end = "on this rank meets another call on ranks [{}]: use one order on all ranks\n"
    assert outputs == [f"ValueError: {average} {end.format(1)}", f"ValueError: {product} {end.format(0)}"]


def test_a_rank_that_does_not_call_distribute(outcome: Callable[..., Outcome]) -> None:
    output = outcome(trials.does_not_come, 2, 0.5)[0][1]
    text = "the check that all ranks train the same failed on rank 0: a rank of [1] did not come within 0.5 s"
    assert output.startswith(f"RuntimeError: {text}")


@pytest.mark.parametrize("seconds", [-1.0, 0.0])
@pytest.mark.parametrize("transport", ["shm", "pg"])
def test_a_timeout_that_is_none(transport: str, seconds: float, outcome: Callable[..., Outcome]) -> None:
    for _, output in outcome(trials.is_late, 2, transport, "ssgd", seconds):
        assert output == f"ValueError: timeout is {seconds:g}: it must be above 0 and at most 1000000 seconds\n"
