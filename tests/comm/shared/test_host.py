"""Ranks that share memory: the same bits as over a process group, and the errors of dead, late and wrong ranks.

The functions that the ranks run are in helpers/shared_memory_ranks.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ddpcore.comm.reductions import CHUNK, average_share_
from ddpcore.comm.shared.memory import HostMemory
from helpers import ranks
from helpers import shared_memory_ranks as trials

Outcome = list[tuple[int, str]]  # of each rank: exit status, output
KILLED = -9


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcome]]:
    before, folder = ranks.names_in_shared_memory(), tmp_path_factory.mktemp("shared")
    yield ranks.Trials("shared_memory_ranks", folder, all_at_once=ranks.has_slow_items(request))
    assert ranks.names_in_shared_memory() <= before


@pytest.fixture
def outcome(outcomes: dict[str, Outcome]) -> Callable[..., Outcome]:
    return lambda function, *arguments: outcomes["-".join([function.__name__, *map(str, arguments)])]


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(6, marks=pytest.mark.slow)])
def test_same_bits_as_over_the_process_group(world_size: int, outcome: Callable[..., Outcome]) -> None:
    """Parameters, BatchNorm's buffers and the evaluation model after gradient accumulation, fp32 and bf16."""
    for status, output in outcome(trials.trains, world_size):
        lines = [line.split() for line in output.splitlines()]
        assert status == 0
        assert len(lines) == len(trials.STRATEGIES)
        for strategy, dtype, same, finite in lines:
            assert (same, finite) == ("True", "True"), f"{strategy} in {dtype}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "world_size", "lost", "operation"),
    [
        (trials.dies_before_an_exchange, 4, 1, "the exchange of 5000 float32 at step 3"),
        (trials.dies_in_an_average, 3, 2, "an average of 5000 float32"),
        (trials.dies_in_an_allocation, 3, 1, "the allocation of 20000 bytes"),
        (trials.leaves, 3, 1, "the exchange of 5000 float32 at step 1"),
    ],
)
def test_a_rank_that_is_gone_is_named(
    function: Any, world_size: int, lost: int, operation: str, outcome: Callable[..., Outcome]
) -> None:
    """By all other ranks, also those that wait only for living ranks, and long before the timeout of a minute."""
    seen = outcome(function, world_size)
    assert seen[lost] == ((0 if function is trials.leaves else KILLED), "")
    for rank, (status, output) in enumerate(seen):
        if rank != lost:
            assert status == 0, f"rank {rank} hung"
            assert f"RuntimeError: rank {lost} is gone" in output
            assert operation in output


@pytest.mark.slow
def test_a_rank_that_does_not_arrive_is_named(outcome: Callable[..., Outcome]) -> None:
    for _, output in [outcome(trials.stays_away, 3)[rank] for rank in (0, 2)]:
        assert "rank 1 did not arrive within 1 s at operation 4, the exchange of 5000 float32 at step 1" in output


def test_a_slow_rank_is_waited_for(outcome: Callable[..., Outcome]) -> None:
    assert outcome(trials.is_slow, 3) == [(0, "[1.0]\n")] * 3


@pytest.mark.parametrize("in_place", [False, True])
def test_a_slow_reader_reads_the_row_of_its_step(in_place: bool, outcome: Callable[..., Outcome]) -> None:
    assert outcome(trials.reads_slowly, 2, in_place)[1] == (0, f"{[[float(step)] for step in range(6)]}\n")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_weights_exchanged_in_place_need_no_copy(world_size: int, outcome: Callable[..., Outcome]) -> None:
    assert outcome(trials.exchanges_in_place, world_size) == [(0, "2\n")] * world_size


def test_a_gradient_that_one_rank_does_not_have(outcome: Callable[..., Outcome]) -> None:
    assert outcome(trials.misses_a_gradient, 3) == [(0, "shm True\npg True\npg True\nTrue\n")] * 3


def test_a_removed_parameter_group_and_a_saved_model(outcome: Callable[..., Outcome]) -> None:
    assert outcome(trials.freezes_and_saves, 2) == [(0, "True\n")] * 2


def test_other_calls_are_named(outcome: Callable[..., Outcome]) -> None:
    for rank, (_, output) in enumerate(outcome(trials.averages_another_size, 3)):
        other = 0 if rank == 1 else 1
        assert f"rank {other} came to operation 1 with" in output
        assert "of 32 float32" in output and "of 64 float32" in output
    for rank, (_, output) in enumerate(outcome(trials.calls_something_else, 3)):
        assert f"rank {0 if rank == 1 else 1} came to operation 5 with" in output
        assert "an average of 5000 float32" in output and "the exchange of 5000 float32 at step 1" in output


def test_ranks_that_cannot_share_memory(outcome: Callable[..., Outcome]) -> None:
    why = "shared memory does not connect these ranks: rank 1 cannot open the memory of another (not yours)"
    for status, output in outcome(trials.is_refused, 2):
        taken, refused = output.splitlines()
        assert status == 0
        assert taken == f"torch.distributed, gloo ({why}: use --transport pg)"
        assert refused == f"Unreachable: {why}: use --transport pg"
    for _, output in outcome(trials.is_on_another_host, 3):
        assert "the 3 ranks are on 2 hosts: use --transport pg" in output
    for status, output in outcome(trials.lacks_flags, 2):
        assert status == 0
        assert "gloo (shared memory does not connect these ranks: rank 1 cannot open" in output
        assert "(no flags)" in output


def test_unused_memory_is_freed(outcome: Callable[..., Outcome]) -> None:
    assert outcome(trials.frees, 2) == [(0, "freed\n")] * 2


@pytest.mark.slow
@pytest.mark.parametrize("trial", [one for one in trials.TRIALS if one[0] is trials.is_killed_somewhere])
def test_killed_at_any_moment(trial: tuple[Any, ...], outcome: Callable[..., Outcome]) -> None:
    """The other ranks raise and end by themselves. The fixture checks that no file remains."""
    seen = outcome(*trial)
    assert seen[1][0] == KILLED
    for status, output in seen:
        assert status in (0, KILLED)
        while_setting_up = re.search(r"a rank of \[.*1.*\] died", output)  # gloo does not say which
        assert status == KILLED or "rank 1 is gone" in output or while_setting_up


@pytest.mark.slow
@pytest.mark.parametrize(
    "trial",
    [one for one in trials.TRIALS if one[0] is trials.trains_something_else],
    ids=lambda trial: "-".join(map(str, trial[1:])),
)
def test_ranks_that_differ_are_named(trial: tuple[Any, ...], outcome: Callable[..., Outcome]) -> None:
    """On every rank and over every transport, because the check runs before the ranks connect."""
    facts = {
        "shape": "parameter 0.weight is float32 [8, 5] on rank 1 and float32 [7, 5] on rank 0",
        "dtype": "parameter 0.weight is float64 [7, 5] on rank 1",
        "buffer": "buffer 1.running_mean is missing on rank 1 and float32 [7] on rank 0",
        "frozen": "parameter 1.bias is float32 [7] frozen on rank 1",
        "optimizer": "optimizer is SGD on rank 1 and FusedSGD on rank 0",
        "topology": "RandomPair(seed=1, ",
        "matrix": "FromMatrix(rounds=(Round(self_weight=0.25",
        "strategy": "strategy is LocalSGD(period=4, ",
        "transport": "transport is pg on rank 1 and shm on rank 0",
    }
    for _, output in outcome(*trial):
        assert output.startswith("ValueError: ranks do not train the same: ")
        assert facts[trial[2]] in output


# --- without other ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 15, 64, 65, 1000, 3 * CHUNK + 7])
@pytest.mark.parametrize("num_rows", [2, 3, 5])
def test_shares_make_up_the_mean(numel: int, num_rows: int) -> None:
    """Each element is averaged once, in ascending order, also if some shares are empty; 16 bits are added in fp32."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        rows = torch.randn(num_rows, numel).to(dtype)
        wide = rows.float() if dtype == torch.bfloat16 else rows
        expected = wide[0].clone()
        for row in wide[1:]:
            expected += row
        expected = (expected / num_rows).to(dtype)
        for rank in reversed(range(num_rows)):
            average_share_(list(rows), rank)
        assert torch.equal(rows, expected.expand(num_rows, -1))


def test_a_segment_is_nameless_and_private() -> None:
    own, handle = HostMemory().allocate(5000)
    path = f"/proc/self/fd/{int(handle)}"
    assert os.readlink(path).endswith("(deleted)")
    assert os.stat(path).st_mode & 0o777 == 0o600
    other = HostMemory().open(os.getpid(), handle, 5000)
    other.fill_(3)
    assert own.eq(3).all()
    del own
    assert not os.path.exists(path)
    assert other.eq(3).all(), "a reader keeps its mapping"
