"""Ranks that wait for each other on streams: with replaced calls of CUDA on the CPU, and with ranks on GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as torch_symmetric
from torch._C._distributed_c10d import _SymmetricMemory

from ddpcore.comm.shared import symmetric
from ddpcore.testing.learners import Result
from helpers import oracle, ranks
from helpers.symmetric_ranks_cuda import CASES

SIZES = (2, 4)
CAPTURED = "nothing"  # what a call says that is not refused


@functools.cache
def on_cpu(world_size: int) -> list[dict[Any, Any]]:
    return ranks.run("symmetric_ranks_cpu", world_size)


@functools.cache
def on_cuda(world_size: int) -> list[dict[Any, Any]]:
    return ranks.run("symmetric_ranks_cuda", world_size, timeout=80.0)


def skip_without(num_ranks: int) -> None:
    """Two ranks may share a GPU, which runs them in turn."""
    if torch.cuda.device_count() < num_ranks // 2:
        pytest.skip(f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices for {num_ranks} ranks")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_has_the_bits_of_shared_memory(case: oracle.Case) -> None:
    """Ranks and the two streams of each come to their signals in another order in each run."""
    for seen in on_cpu(case.world_size):
        ours, theirs = seen["symmetric", tuple(case)], seen["shm", tuple(case)]
        for name in ("weights", "losses", "average"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert (ours.consensus, ours.bytes_sent) == (theirs.consensus, theirs.bytes_sent)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("seed", [0, 1])
def test_any_calls_in_one_order(seed: int, world_size: int) -> None:
    """Exchanges that overlap, are abandoned and quarantined, with other readers each time; averages beside them."""
    for seen in on_cpu(world_size):
        wrong, num_done, is_consistent = seen["events", seed]
        assert wrong == []
        assert num_done > 40
        assert is_consistent


@pytest.mark.parametrize("world_size", SIZES)
def test_no_signal_waits_for_the_last_one_to_be_taken(world_size: int) -> None:
    """So a rank that is ahead waits in no put, only where it takes a signal."""
    for seen in on_cpu(world_size):
        assert seen["counts"]["full"] == 0
        assert min(seen["counts"][name] for name in ("put", "wait", "barriers")) > 100


@pytest.mark.parametrize("world_size", SIZES)
def test_hosts_do_not_meet_after_the_first_steps(world_size: int) -> None:
    """And no host waits for its device: that is an error in all of these runs."""
    assert [seen["set-ups"] for seen in on_cpu(world_size)] == [0] * world_size


@pytest.mark.parametrize("world_size", SIZES)
def test_what_a_graph_may_repeat(world_size: int) -> None:
    """An even number of steps. Others end with the error of the timeout on every rank, at their first signal."""
    for seen in on_cpu(world_size):
        assert (seen["replayed"][2], seen["replayed"][4]) == (True, True)
        for num_steps in (1, 3):
            assert str(seen["replayed"][num_steps]).startswith("signal 0: [FATAL]")


ERRORS = {
    "twice": "RuntimeError: an exchange is used once",
    "integers": "ValueError: int32 has no average",
    "changing": "RuntimeError: a CUDA graph repeats the neighbours of step 3",
    "cold": f"RuntimeError: {symmetric.COLD}",
    "allocate": f"RuntimeError: {symmetric.COLD}",
    "one step": f"RuntimeError: {symmetric.COLD}",
    "part": "RuntimeError: a CUDA graph has a part of an exchange only",
    "channels": "RuntimeError: the exchanges of 2 ranks need",
    "fixed": CAPTURED,
    "after": "consistent",
}


@pytest.mark.parametrize(("call", "says"), ERRORS.items())
def test_wrong_calls_are_one_clear_error_and_change_nothing(call: str, says: str) -> None:
    for seen in on_cpu(2):
        error = seen["while training"][call]
        assert error.startswith(says)
        assert "\n" not in error


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("_check_reach", "these ranks: rank 1: no peer access"),
        ("_empty", "these ranks: rank 0: no peer access"),
        ("_rendezvous", "these ranks: rank 1: no peer access"),
        ("too many", "connects 1 ranks"),
    ],
)
def test_what_one_rank_cannot_do_every_rank_says(call: str, says: str, world_size: int) -> None:
    for seen in on_cpu(world_size):
        error = seen["at the start"][call]
        assert says in error
        assert error.endswith("use --transport pg")
        assert error.startswith(("Unreachable", "ValueError"))
        assert "\n" not in error


def test_one_rank() -> None:
    for seen in on_cpu(2):
        ways = ("symmetric", "symmetric memory on one host, 1 ranks")
        assert seen["alone"] == {"rows": [[2.0] * 3], "milliseconds": 1, "ways": ways}


# --- the calls of CUDA -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("barrier", "channel timeout_ms"),
        ("put_signal", "dst_rank channel timeout_ms"),
        ("wait_signal", "src_rank channel timeout_ms"),
        ("get_buffer", "rank sizes dtype"),
        ("get_signal_pad", "rank"),
        ("empty_strided_p2p", "size stride dtype device"),
        ("get_backend", ""),
    ],
)
def test_torch_has_the_methods_that_are_called(name: str, words: str) -> None:
    text = getattr(_SymmetricMemory, name).__doc__
    places = [text.index(f"{word}:") for word in words.split()]
    assert places == sorted(places)


def test_zeros_are_there_before_another_stream_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def empty(*words: Any) -> torch.Tensor:
        calls.append(words)
        return torch.full((8,), 7, dtype=torch.uint8)

    monkeypatch.setattr(symmetric, "_SymmetricMemory", SimpleNamespace(empty_strided_p2p=empty))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(device))
    device = torch.device("cuda", 3)
    assert symmetric._empty(8, device).tolist() == [0] * 8
    assert calls == [((8,), (1,), torch.uint8, device), device]


def test_the_rendezvous_is_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_symmetric, "rendezvous", lambda own, group: (own, group))
    assert symmetric._rendezvous("own", "group") == ("own", "group")


@pytest.mark.parametrize(
    ("backend", "reached", "says"),
    [
        ("CUDA", {1, 2}, None),
        ("CUDA", {1}, "GPU 0 cannot reach the memory of GPU 2"),
        ("NVSHMEM", {1, 2}, "that of NVSHMEM and not of CUDA"),
        (None, {1, 2}, "that of None and not of CUDA"),
    ],
)
def test_gpus_that_do_not_reach_each_other(
    backend: str | None, reached: set[int], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric, "_SymmetricMemory", SimpleNamespace(get_backend=lambda device: backend))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: other in reached)
    call: Callable[[], None] = functools.partial(symmetric._check_reach, torch.device("cuda", 0), [0, 1, 2, 0])
    if says is None:
        call()
    else:
        with pytest.raises(RuntimeError, match=says):
            call()


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert symmetric._with_index(torch.device("cuda")) == torch.device("cuda", 2)
    assert symmetric._with_index(torch.device("cuda", 1)) == torch.device("cuda", 1)


def test_streams_wait_for_each_other_and_the_host_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The side stream waits for the one that calls. The one that is current at the end waits for its event."""
    calls: list[str] = []
    current = ["main"]

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = name if isinstance(name, str) else "side"

        def wait_stream(self, other: Stream) -> None:
            calls.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: str) -> None:
            calls.append(f"{self.name} waits for {event}")

        def record_event(self) -> str:
            calls.append(f"{self.name} records")
            return f"the event of {self.name}"

    @contextmanager
    def on(stream: Stream) -> Any:
        before, current[0] = current[0], stream.name
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(current[0]))
    join = symmetric._Side(torch.device("cuda", 0)).run(lambda: calls.append(f"work on {current[0]}"))
    assert calls == ["side waits for main", "work on side", "side records"]
    with on(Stream("another")):
        join()
    assert calls[3:] == ["another waits for the event of side"]


# --- GPUs --------------------------------------------------------------------------------------------------------


@functools.cache
def virtual(case: oracle.Case) -> Result:
    """Virtual learners on the CPU."""
    return oracle.train(case)


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_on_gpus(case: oracle.Case) -> None:
    """A GPU rounds matrix products in another way: see ``tests/distributed/test_device_ranks.py``."""
    skip_without(case.world_size)
    expected = virtual(case)
    for rank, seen in enumerate(on_cuda(case.world_size)):
        largest = expected.weights.abs().max()
        assert (seen[tuple(case)].weights - expected.weights[rank : rank + 1]).abs().max() <= 1e-4 * largest


@pytest.mark.cuda
@pytest.mark.parametrize("world_size", SIZES)
def test_any_calls_and_replays_on_gpus(world_size: int) -> None:
    """Exchanges and averages in a drawn order; a graph that is replayed has the bits of the steps that it holds."""
    skip_without(world_size)
    for seen in on_cuda(world_size):
        assert seen["wrong"] == []
        assert seen["done"] > 40
        assert torch.equal(*seen["captured"])
