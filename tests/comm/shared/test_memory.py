"""Files in memory that processes share."""

from __future__ import annotations

import os

import pytest
import torch

from ddpcore.comm.shared.memory import HostMemory, create_file, open_file


@pytest.mark.parametrize("num_bytes", [0, 4096, 2**20])
def test_no_process_can_change_the_size(num_bytes: int) -> None:
    """Also not a peer, which opens the file by its descriptor: the others would die of SIGBUS."""
    own = create_file(5000)
    peer = open_file(os.getpid(), own)
    for descriptor in (own, peer):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, num_bytes)
        assert os.fstat(descriptor).st_size == 5000
    os.close(peer)
    os.close(own)


def test_buffers_are_written_by_both_sides() -> None:
    memory = HostMemory()
    own, handle = memory.allocate(100)
    other = memory.open(os.getpid(), handle, 100)
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
