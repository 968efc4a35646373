"""A thread of each rank computes averages in shared memory while the rank does other work."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpcore.comm.shared.coordination import NUM_TEXTS
from ddpcore.comm.shared.memory import Buffers
from ddpcore.comm.shared.segments import Averages
from helpers import average_thread_ranks as script
from helpers import oracle, ranks


def run(what: str) -> list[Any]:
    return ranks.run("average_thread_ranks", 4, more=[[what]] * 4)


@pytest.mark.parametrize("what", ["thread", "inference"])
def test_a_thread_averages_before_anyone_waits(what: str) -> None:
    """It ends with the connection. It averages tensors of the inference mode, too."""
    for seen in run(what):
        assert seen["before_wait"].tolist() == [[1.5] * 5000]
        assert seen["threads"] == ["ddpcore averages"] and seen["at_the_end"] == []
        assert seen["description"] == "shared memory of one host, 4 ranks, averages in a thread of each"


def test_without_a_thread_who_waits_averages() -> None:
    for rank, seen in enumerate(run("none")):
        assert seen["before_wait"].tolist() == [[float(rank)] * 5000]
        assert seen["threads"] == [] and seen["description"] == "shared memory of one host, 4 ranks"


def test_many_averages_and_other_operations_between_them() -> None:
    numbers = range(0, script.NUM_AVERAGES, 97)
    for seen in run("many"):
        assert torch.equal(seen["row"], torch.arange(10.0 * script.NUM_AVERAGES)[None] * 2.5)
        assert [one.flatten().tolist() for one in seen["gathered"]] == [[n, n + 1, n + 2, n + 3] for n in numbers]


def test_training_has_the_bits_of_virtual_learners() -> None:
    found = run("trained")
    for case in script.CASES:
        virtual = oracle.train(case)
        real = [one[tuple(case)] for one in found]
        assert torch.equal(torch.cat([one.weights for one in real]), virtual.weights)
        assert torch.equal(torch.cat([one.losses for one in real], dim=1), virtual.losses)


@pytest.mark.parametrize("what", ["other_sizes", "unlike_and_old"])
def test_each_rank_is_told_that_one_averages_something_else(what: str) -> None:
    """Also without a thread, and if so many averages begin that the texts of the first ones would be overwritten."""
    for message in run(what):
        assert "rank 2 came to operation" in message or "rank 2 with" in message, message


@pytest.mark.parametrize("what", ["stopped", "stopped_in_thread"])
def test_half_an_average_is_never_repeated_and_each_rank_is_told(what: str) -> None:
    """What is half added would be added twice."""
    error = "KeyboardInterrupt" if what == "stopped" else "MemoryError (none is left)"
    told = f"RuntimeError: rank 1 was stopped in the middle of an average by {error}"
    for rank, (first, second) in enumerate(run(what)):
        assert first == (told if rank != 1 or what == "stopped_in_thread" else "KeyboardInterrupt: ")
        assert second == told


def test_no_average_counts_as_finished_before_it_is() -> None:
    for row in run("settled"):
        assert row.unique().tolist() == [1.5]


def test_averages_that_a_thread_completes_while_another_begins() -> None:
    """Between the count of those that are left and the look at the first one."""

    class Fast(deque[Any]):
        def __len__(self) -> int:
            num = super().__len__()
            self.clear()
            return num

        def __getitem__(self, index: Any) -> Any:
            self.clear()
            return super().__getitem__(index)

    one = Averages(SimpleNamespace(arrive=lambda text: 7), SimpleNamespace(publish=lambda: None), [0, 1])  # type: ignore[arg-type]
    one._pending = Fast(range(NUM_TEXTS))
    one.begin("an average", [])
    assert [work.number for work in one._pending] == [7]


def test_a_buffer_is_found_while_a_thread_frees_another() -> None:
    buffers, rows = Buffers(0), [torch.zeros(8, dtype=torch.uint8) for _ in range(3)]
    for row in rows:
        buffers.add(row, {0: row, 1: row.clone()})

    class Place:
        """Of the first buffer. The second one is freed while it is looked at."""

        def __len__(self) -> int:
            return 8

        @property
        def start(self) -> int:
            buffers._known.pop(1, None)
            return rows[0].data_ptr()

    buffers._known[0] = Place(), {}  # type: ignore[assignment]
    found = buffers.find(rows[2][None])
    assert found is not None and found[0] == "at byte 0 of buffer 2"


def test_each_rank_is_told_that_one_died() -> None:
    *living, dead = run("dies")
    assert dead == "died"
    for message in living:
        assert "rank 3 is gone (it died or left)" in message, message


def test_a_program_ends_with_averages_that_never_happen() -> None:
    assert run("leaves") == ["left"] * 4


@pytest.mark.parametrize(("num_cores", "expected"), [(1, False), (3, False), (4, True), (64, True)])
def test_two_cores_a_rank_have_a_thread(num_cores: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from ddpcore.comm.shared import segments as host

    made: dict[str, Any] = {}
    monkeypatch.setattr(host.launch, "num_cores", lambda: num_cores)
    monkeypatch.setattr(host, "default_group", lambda group: group)
    monkeypatch.setattr(host.SegmentCommunicator, "__init__", lambda self, *args, **more: made.update(more))
    host.SharedMemoryCommunicator(None, among=[0, 3])
    assert made["in_thread"] is expected
