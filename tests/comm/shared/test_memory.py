"""Files in memory that processes share."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from itertools import product

import pytest
import torch

from ddpcore.comm.shared import memory
from ddpcore.comm.shared.coordination import Coordinator
from ddpcore.comm.shared.memory import HostMemory, create_file, open_file


def test_no_process_can_change_the_size() -> None:
    """Also not a peer, which opens the file by its descriptor: the others would die of SIGBUS."""
    own = create_file(5000)
    peer = open_file(os.getpid(), own)
    for descriptor, num_bytes in product((own, peer), (0, 4096, 2**20)):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, num_bytes)
        assert os.fstat(descriptor).st_size == 5000
    os.close(peer)
    os.close(own)


def test_buffers_are_written_by_both_sides() -> None:
    own, handle = HostMemory().allocate(100)
    other = HostMemory().open(os.getpid(), handle, 100)
    assert not own.any() and own.dtype == torch.uint8
    own[3], other[4] = 7, 9
    assert (other[3], own[4]) == (7, 9)


def test_a_fork_keeps_what_the_buffers_held() -> None:
    """A forked process that saves the weights, or a data loader, has those of the fork, as of ordinary memory."""
    own, _ = HostMemory().allocate(10000)
    own.fill_(1)
    (reads, writes), array = os.pipe(), own.numpy()
    child = os.fork()
    if not child:
        os.read(reads, 1)
        was = array.tobytes() == b"\1" * 10000
        array[:5000] = 3
        os._exit(0 if was and array.tobytes() == b"\3" * 5000 + b"\1" * 5000 else 1)
    own.fill_(2)
    os.write(writes, b".")
    assert os.waitpid(child, 0)[1] == 0
    assert own.eq(2).all()


def test_threads_that_fork_at_once_leave_the_buffers_alone() -> None:
    buffers = [HostMemory().allocate(2**20)[0] for _ in range(4)]
    begin, codes = threading.Barrier(3), list[int]()

    def fork() -> None:
        for _ in range(10):
            begin.wait()
            if not (child := os.fork()):
                for buffer in buffers:
                    buffer.numpy()[:] = 9
                os._exit(0)
            codes.append(os.waitpid(child, 0)[1])

    threads = [threading.Thread(target=fork) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 30 and not any(buffer.any() for buffer in buffers)


def test_a_fork_while_other_threads_allocate_leaves_the_buffers_alone(request: pytest.FixtureRequest) -> None:
    buffers, ends = [HostMemory().allocate(2**14)[0] for _ in range(20)], threading.Event()
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)

    def allocate() -> None:
        while not ends.is_set():
            [HostMemory().allocate(4096) for _ in range(4)]

    threads = [threading.Thread(target=allocate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        if not (child := os.fork()):
            for buffer in buffers:
                buffer.numpy()[:] = 9
            os._exit(0)
        os.waitpid(child, 0)
    ends.set()
    for thread in threads:
        thread.join()
    assert not any(buffer.any() for buffer in buffers)


def test_a_fork_for_whose_copies_memory_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the child writes does not reach the parent."""
    own, _ = HostMemory().allocate(10000)
    mmap = memory._library.mmap
    monkeypatch.setattr(memory._library, "mmap", lambda *given: memory._NONE if given[4] < 0 else mmap(*given))
    child = os.fork()
    if not child:
        own.numpy()[:] = 3
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0 and not own.any()


def test_a_rank_that_joins_meets_one_that_has_died() -> None:
    coordinator = Coordinator(None, 1.0)
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(OSError, match="a rank of the run died while this one joined: join again"):
        coordinator.join(1, {0: coordinator.address._replace(pid=child)}, 0)
