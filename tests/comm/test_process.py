"""Real learners: one rank in this process, and three ranks, over a process group, shared memory, and both."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpcore import Complete, RandomPair
from ddpcore.comm import Communicator, ProcessGroupCommunicator, SharedMemoryCommunicator
from ddpcore.comm.groups import time_limit
from helpers import ranks
from helpers.communicator_ranks import MEAN, NO_MEAN


def test_without_a_process_group() -> None:
    for make in (ProcessGroupCommunicator, SharedMemoryCommunicator):
        with pytest.raises(ValueError, match=r"torchrun.*learners="):
            make()


@pytest.fixture(params=[ProcessGroupCommunicator, SharedMemoryCommunicator])
def alone(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Communicator]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield request.param()
    dist.destroy_process_group()


def test_a_world_of_one(alone: Communicator) -> None:
    """Nothing is sent and nothing changes."""
    assert (alone.num_learners, tuple(alone.learners)) == (1, (0,))
    assert ("gloo" if isinstance(alone, ProcessGroupCommunicator) else "shared memory") in alone.description
    rows = torch.randn(1, 32)
    before = rows.clone()
    alone.average_(rows).wait()
    alone.broadcast_(rows)
    assert torch.equal(alone.gather(rows), before)
    for topology in (Complete(), RandomPair()):
        alone.exchange(rows, topology, 0).mixture().apply_(rows)
        mixture = alone.exchange(rows, topology, 0).mixture()
        assert (list(mixture.peers), mixture.self_weight) == ([], 1.0)
    assert torch.equal(rows, before)
    assert alone.bytes_sent == 0


def test_other_calls_keep_the_timeout_of_the_group(tmp_path: Path) -> None:
    """A timeout is for calls of ddpcore, which leave the group as it was also after an error."""
    hour = timedelta(hours=1)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=hour)
    try:
        comm = ProcessGroupCommunicator(timeout=7.0)
        options = comm.group._get_backend(torch.device("cpu")).options
        with pytest.raises(RuntimeError, match="a call failed on rank 0"), comm._call("a call", torch.ones(1)):
            assert options._timeout == timedelta(seconds=7)
            raise RuntimeError("no matter what")
        assert options._timeout == hour
        with time_limit(comm.group, 3.0):
            comm.broadcast_(torch.zeros(1, 4))
            assert options._timeout == timedelta(seconds=3)
        assert options._timeout == hour
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def everything() -> list[dict[str, Any]]:
    return ranks.run("communicator_ranks", 3)


@pytest.fixture(params=["pg", "shm", "mixed"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def seen(transport: str, everything: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of three ranks."""
    return [one[transport] for one in everything]


def test_receives_are_posted_before_sends(everything: list[dict[str, Any]]) -> None:
    """Else gloo sends one direction after the other, and an exchange over a slow link takes twice as long."""
    assert [one["order"] for one in everything] == [["recv", "recv", "send", "send"]] * 3


def test_average(seen: list[dict[str, Any]]) -> None:
    """Columns 2 to 5 become the mean, and the others stay, whether rows are gathered or reduced."""
    for rank, one in enumerate(seen):
        assert (one["n"], tuple(one["learners"])) == (3, (rank,))
        expected = torch.arange(8.0)[None] + 10 * rank
        expected[:, 2:6] += 10 - 10 * rank
        for way in ("by_gather", "by_reduce"):
            assert torch.equal(one[way], expected), way


def test_two_averages_in_progress(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert torch.equal(one["first"], torch.ones(1, 5))
        assert torch.equal(one["second"], torch.full((1, 70), 10.0))


def test_broadcast_and_gather(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert torch.equal(one["broadcast"], torch.zeros(1, 3))
        assert one["gathered"].tolist() == [[0.0, -1.0], [1.0, -1.0], [2.0, -1.0]]
        assert one["gathered_mask"].tolist() == [[0, 1], [1, 1], [2, 1]]


def test_exchange(seen: list[dict[str, Any]]) -> None:
    """Each rank averages with all: the mean of 0, 1 and 2."""
    for one in seen:
        torch.testing.assert_close(one["mixed"], torch.ones(1, 16))


def test_mix_has_the_bits_of_an_exchange(seen: list[dict[str, Any]]) -> None:
    """Also where two ranks share the work: rounds of pairs, with an idle learner, and with idle learners only."""
    for topology in seen[0]["at_once"]:
        rows = [one["at_once"][topology] for one in seen]
        moved = 0
        for step in range(4):
            for at_once, exchanged, sent, sent_by_exchange in (row[step] for row in rows):
                assert torch.equal(at_once, exchanged), (topology, step)
                assert sent == sent_by_exchange
                moved += sent
        assert moved > 0


def test_bytes(transport: str, seen: list[dict[str, Any]]) -> None:
    """For 4 floats an all-reduce sends 2 * 2/3 of 16 bytes, a gathered average twice 16, and an exchange twice 64.

    Shared memory gathers nothing: other ranks read and write a rank's row, except for the rank's own third.
    """
    for one in seen:
        assert one["bytes_by_reduce"] == 2 * 2 * 16 // 3
        assert one["bytes_exchange"] == 2 * 64
        assert one["bytes_by_gather"] == (2 * 2 * 16 // 3 if transport == "shm" else 2 * 16)


@pytest.mark.parametrize("transport", ["pg", "shm", "mixed", "grid"])
def test_averages_of_16_bits_are_rounded_once(transport: str, everything: list[dict[str, Any]]) -> None:
    """Equal rows stay. Others become the mean of the fp32 sum, exactly if the order of the sum is fixed."""
    for name in everything[0]["narrow"][transport]:
        starts, ends, bytes_sent = zip(*(one["narrow"][transport][name] for one in everything), strict=True)
        start, end = torch.cat(starts), torch.cat(ends)
        mean = (sum(start.float()) / len(start)).to(start.dtype)
        if name.startswith("alike"):
            assert torch.equal(end, start), name
            assert torch.equal(mean, start[0]), name
        elif "reduce" in name and transport == "grid":  # gloo adds in another order, so the last bit may differ
            torch.testing.assert_close(end, mean.expand_as(end), rtol=torch.finfo(start.dtype).eps, atol=1e-6)
        else:
            assert torch.equal(end, mean.expand_as(end)), name
        if "reduce" in name and transport != "shm":  # a sum of several rows is sent in fp32
            num, width = (6, 4) if transport == "grid" else (3, 2)
            assert bytes_sent == (2 * (num - 1) * width * start.shape[1] // num,) * 3


@pytest.mark.parametrize("transport", ["pg", "shm", "mixed", "grid"])
def test_all_dtypes_are_sent_and_those_with_a_mean_are_averaged(
    transport: str, everything: list[dict[str, Any]]
) -> None:
    """The others are refused on all ranks, before anything is sent."""
    results = [one["dtypes"][transport] for one in everything]
    for dtype in MEAN + NO_MEAN:
        own, first, gathered, ends = zip(*(one[str(dtype)] for one in results), strict=True)
        assert all(torch.equal(rows, own[0]) for rows in first), dtype
        assert all(torch.equal(rows, torch.cat(own)) for rows in gathered), dtype
        if dtype in MEAN:  # of 0, 1 and 2, plus the column
            assert torch.equal(torch.cat(ends), (torch.arange(6) + 1).to(dtype).expand(len(torch.cat(own)), 6)), dtype
        else:
            name = str(dtype).removeprefix("torch.")
            assert ends == ends[:1] * 3, "the same on all ranks"
            errors, bytes_sent = ends[0]
            assert len(errors) == 2 and bytes_sent == 0
            assert all(error.startswith(f"ValueError: {name} has no average: convert the values") for error in errors)
