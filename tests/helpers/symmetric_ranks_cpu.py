"""The ranks of ``symmetric_ranks_cuda`` without a GPU: threads stand in for streams, memory of the host for a GPU's.

A signal does what torch's kernels do (``CUDASymmetricMemory.cu``): a word of the pad of the rank that takes it, for
each channel and sender. Putting waits until it is 0 and makes it 1, taking waits until it is 1 and makes it 0.
"""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpcore.comm import connect
from ddpcore.comm.choice import Transport
from ddpcore.comm.shared import symmetric
from ddpcore.comm.shared.flags import LINE_BYTES, Flags
from ddpcore.comm.shared.memory import HostMemory
from helpers.oracle import train
from helpers.ranks import join
from helpers.symmetric_ranks_cuda import CASES, events_of

PAD_WORDS = 512  # 2048 bytes, as in torch 2.9; later ones have more
host = HostMemory()
handles: dict[int, bytes] = {}
counts: Counter[str] = Counter()
delays = random.Random()
latest: list[Handle] = []  # the one with the signals of the communicator made last
capturing = [False]


def pause() -> None:
    """What other work of a stream may take."""
    if delays.random() < 0.3:
        time.sleep(delays.uniform(0, 2e-3))


class Handle:
    """What torch's rendezvous returns."""

    def __init__(self, own: Tensor, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._pad, pad_handle = host.allocate(PAD_WORDS * LINE_BYTES)
        addresses: list[Any] = [None] * self.world_size
        mine = os.getpid(), handles[own.data_ptr()], own.numel(), pad_handle
        dist.all_gather_object(addresses, mine, group=group)
        self.buffers = [host.open(pid, handle, numel) for pid, handle, numel, _ in addresses]
        self._memory = [host.open(pid, handle, PAD_WORDS * LINE_BYTES) for pid, *_, handle in addresses]
        self.pads = [Flags(memory.numpy()) for memory in self._memory]
        self.recorded: list[Callable[[], None]] | None = None
        dist.barrier(group)  # all have opened what this rank may free
        if own.numel() == 1:
            latest[:] = [self]

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype) -> Tensor:
        return self.buffers[rank].view(dtype).view(sizes)

    def get_signal_pad(self, rank: int) -> Tensor:
        return torch.empty(PAD_WORDS, dtype=torch.uint8)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        self._signal("put", self.pads[dst_rank], channel, self.rank, timeout_ms)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        self._signal("wait", self.pads[self.rank], channel, src_rank, timeout_ms)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        counts["barriers"] += 1
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        for other in others:
            self._change(self.pads[other], channel * self.world_size + self.rank, 0, timeout_ms)
        for other in others:
            self._change(self.pads[self.rank], channel * self.world_size + other, 1, timeout_ms)

    def word(self, owner: int, channel: int, sender: int) -> int:
        return self.pads[owner].read(channel * self.world_size + sender)

    def _signal(self, what: str, flags: Any, channel: int, sender: int, timeout_ms: int) -> None:
        pause()
        index, expected = channel * self.world_size + sender, {"put": 0, "wait": 1}[what]
        counts[what] += 1
        counts["full"] += what == "put" and flags.read(index) == 1
        if self.recorded is not None:
            self.recorded.append(partial(self._change, flags, index, expected, timeout_ms))
        self._change(flags, index, expected, timeout_ms)

    def _change(self, flags: Any, index: int, expected: int, timeout_ms: int) -> None:
        assert 0 <= index < PAD_WORDS and timeout_ms > 0
        deadline = time.monotonic() + timeout_ms / 1000
        while flags.read(index) != expected:
            if time.monotonic() > deadline:
                raise RuntimeError(f"[FATAL] the word {index} did not become {expected}")
            time.sleep(20e-6)
        flags.post(index, 1 - expected)


class Side:
    """A thread that does work in order, late."""

    def __init__(self, device: torch.device) -> None:
        self._work: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            work, done, errors = self._work.get()
            pause()
            try:
                work()
            except Exception as error:
                errors.append(error)
            done.set()

    def run(self, work: Callable[[], None]) -> Callable[[], None]:
        done, errors = threading.Event(), []
        self._work.put((work, done, errors))

        def join() -> None:
            done.wait()
            for error in errors:
                raise error

        return join


def empty(num_bytes: int, device: torch.device) -> Tensor:
    own, handle = host.allocate(num_bytes)
    handles[own.data_ptr()] = handle
    return own


def refuse(*words: object) -> None:
    raise AssertionError("the host waits")


def choose(requested: str, **facts: Any) -> Transport:
    """That of the package, which takes ``symmetric`` on GPUs only."""
    return Transport("symmetric", "as requested") if requested == "symmetric" else real_choice(requested, **facts)


def gathered(group: dist.ProcessGroup, *words: Any) -> list[Any]:
    counts["set-ups"] += 1
    return real_gather(group, *words)


real_choice, real_gather = connect.__globals__["choose_transport"], symmetric.gather_objects


def replace_calls(rank: int) -> None:
    """Replace all calls of CUDA, and refuse those with which a host waits."""
    delays.seed(rank)
    symmetric._empty, symmetric._rendezvous, symmetric._Side = empty, Handle, Side
    symmetric._check_reach, symmetric._with_index = lambda device, devices: None, lambda device: device
    symmetric._is_capturing = lambda: capturing[0]
    symmetric.gather_objects = gathered
    connect.__globals__["choose_transport"] = choose
    torch.cuda.synchronize = torch.cuda.Stream.synchronize = torch.cuda.Event.synchronize = refuse


def consistent(comm: symmetric.SymmetricCommunicator) -> bool:
    """Whether no "ready" is left, a "read" only where the owner has yet to take it, and all have met as often."""
    (handle,) = latest
    others = [rank for rank in range(comm.num_ranks) if rank != comm.rank]
    snapshots = [one for known in comm._snapshots.values() for one in known]
    ready = [handle.word(comm.rank, one.ready, other) for one in snapshots for other in others]
    met = [handle.word(comm.rank, symmetric.BARRIER, other) for other in others]
    read = {(one.read, other): handle.word(comm.rank, one.read, other) for one in snapshots for other in others}
    left = {
        (one.read, other): int(other in one.readers and not one.is_handed_out) for one in snapshots for other in others
    }
    return not any(ready) and not any(met) and read == left


def main() -> None:
    path, rank, world_size = join()
    replace_calls(rank)
    seen: dict[Any, Any] = {}
    device = torch.device("cpu")
    for seed in range(2):
        delays.seed(10 * seed + rank)
        comm, events = events_of(device, pause, seed)
        dist.barrier()
        seen["wrong", seed], seen["done", seed], seen["consistent", seed] = (
            events.wrong,
            events.num_done,
            consistent(comm),
        )
        dist.barrier()
    for case in CASES:
        if case.world_size == world_size:
            for transport in ("shm", "symmetric"):
                seen[transport, tuple(case)] = train(case, dist.group.WORLD, transport=transport)
    seen["counts"] = dict(counts)
    torch.save(seen, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
