"""Counters in shared memory."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import threading
import time

import pytest

from ddpcore.comm.shared import coordination
from ddpcore.comm.shared.coordination import LINE_BYTES, Flags


def memory(num_flags: int = 4) -> mmap.mmap:
    return mmap.mmap(-1, num_flags * LINE_BYTES)


def test_values() -> None:
    shared = memory()
    ours, theirs = Flags(shared), Flags(shared)
    ours.post(2, 7)
    assert [theirs.read(index) for index in range(4)] == [0, 0, 7, 0]
    assert ours.read(2) == 7
    assert ours.wait(2, 7, 0.0) and ours.wait(2, 3, 0.0)
    assert not ours.wait(2, 8, 0.0)
    assert not ours.wait(1, 1, 0.01)


@pytest.mark.parametrize("value", [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33 + 5])
def test_values_wrap_around(value: int) -> None:
    one = Flags(memory())
    one.post(0, value)
    assert one.read(0) == value % 2**32
    assert one.wait(0, value, 0.0) and one.wait(0, value - 1000, 0.0)
    assert not one.wait(0, value + 1, 0.0)


def test_no_such_flag() -> None:
    one = Flags(memory(2))
    with pytest.raises(IndexError):
        one.read(2)
    with pytest.raises(IndexError):
        one.post(2, 1)


def test_other_threads_run_during_a_wait() -> None:
    """The thread that posts needs the GIL, so a wait must release it."""
    one = Flags(memory())
    poster = threading.Thread(target=lambda: (time.sleep(0.05), one.post(0, 1)))
    poster.start()
    assert one.wait(0, 1, 60.0)
    poster.join()


def _answer(shared: mmap.mmap, rounds: int) -> None:
    one = Flags(shared)
    for number in range(1, rounds + 1):
        if not one.wait(0, number, 60.0) or shared[2 * LINE_BYTES] != number % 256:
            os._exit(1)
        shared[3 * LINE_BYTES] = number % 256
        one.post(1, number)
    os._exit(0)


def test_two_processes_take_turns() -> None:
    """No wake-up is lost, and data written before a flag is visible after it."""
    shared, rounds = memory(), 300
    child = multiprocessing.get_context("fork").Process(target=_answer, args=(shared, rounds))
    child.start()
    one = Flags(shared)
    for number in range(1, rounds + 1):
        shared[2 * LINE_BYTES] = number % 256
        one.post(0, number)
        assert one.wait(1, number, 60.0)
        assert shared[3 * LINE_BYTES] == number % 256
    child.join()
    assert child.exitcode == 0


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((ValueError, BufferError, TypeError)):
        Flags(b"read only" * 100)
    monkeypatch.setattr(coordination, "WHY_NOT_COMPILED", "it is not built: build it")
    with pytest.raises(ImportError, match="shared memory needs compiled counters: it is not built: build it"):
        Flags(memory())
