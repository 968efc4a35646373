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

import ddpcore
from ddpcore.comm import connect
from ddpcore.comm.choice import Transport
from ddpcore.comm.shared import symmetric
from ddpcore.comm.shared.flags import LINE_BYTES, Flags
from ddpcore.comm.shared.memory import HostMemory
from helpers.oracle import train
from helpers.ranks import join
from helpers.symmetric_ranks_cuda import CASES, Drawn, events_of

CPU = torch.device("cpu")
PAD_WORDS = 512  # 2048 bytes, as in torch 2.9; later ones have more
host = HostMemory()
handles: dict[int, bytes] = {}
counts: Counter[str] = Counter()
delays = random.Random()
latest: list[Handle] = []  # the one with the signals of the communicator made last
capturing = [False]


def pause(most: int) -> None:
    """What other work of a stream may take, up to so many milliseconds."""
    if delays.random() < 0.3:
        time.sleep(delays.uniform(0, most / 1000))


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
        pause(2)
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
            pause(2)
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


def steps(comm: symmetric.SymmetricCommunicator, num_steps: int, weights: Tensor) -> None:
    for step in range(num_steps):
        comm.exchange(weights, ddpcore.Ring(), step).mixture().apply_(weights)
        comm.average_(weights[:, :10], step).wait()


def steady(comm: symmetric.SymmetricCommunicator) -> int:
    """How often the hosts meet in the steps after the first four."""
    weights = comm.allocate((1, 100), torch.float32, CPU)
    steps(comm, 4, weights)
    before = counts["set-ups"]
    steps(comm, 6, weights)
    return counts["set-ups"] - before


def replayed(num_steps: int, milliseconds: int) -> bool | str:
    """Whether the signals of a graph of so many steps, replayed three times, are consistent; or its error.

    The first replay must not fail, so only the others have this timeout.
    """
    comm = symmetric.SymmetricCommunicator(None, CPU, timeout=60.0)
    weights, (handle,) = torch.ones(1, 100), latest
    exchange = lambda step: comm.exchange(weights, ddpcore.Ring(), step).mixture().apply_(weights)  # noqa: E731
    for step in range(4):
        exchange(step)
    dist.barrier()
    handle.recorded = []
    for step in range(num_steps):  # a capture runs nothing: this is the first replay
        exchange(step)
    recorded, handle.recorded = handle.recorded, None
    rest = [partial(call.func, *call.args[:-1], milliseconds) for call in recorded * 2]
    try:
        while rest:
            rest[0]()
            del rest[0]
    except RuntimeError as error:
        return f"signal {2 * len(recorded) - len(rest)}: {error}"
    finally:
        dist.barrier()
    return consistent(comm)


def error_of(call: Callable[[], object], *, captures: bool = False) -> str:
    capturing[0] = captures
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        capturing[0] = False
    return "nothing"


def refused_while_training(comm: symmetric.SymmetricCommunicator) -> dict[str, str]:
    """The errors of wrong calls. The connection works after each."""
    weights, small, ring = torch.ones(1, 100), torch.ones(1, 5), ddpcore.Ring()
    seen = {}
    exchange = comm.exchange(weights, ring, 0)
    exchange.mixture()
    seen["twice"] = error_of(exchange.mixture)
    seen["integers"] = error_of(lambda: comm.average_(torch.ones(1, 3, dtype=torch.int32)))
    steps(comm, 4, weights)
    seen["changing"] = error_of(lambda: comm.exchange(weights, Drawn(), 3), captures=True)
    seen["cold"] = error_of(lambda: comm.exchange(small, ring, 0), captures=True)
    seen["allocate"] = error_of(lambda: comm.allocate((1, 3), torch.float32, CPU), captures=True)
    comm.exchange(small, ring, 0).mixture()
    seen["one step"] = error_of(lambda: comm.exchange(small, ring, 1), captures=True)
    exchange = comm.exchange(weights, ring, 1)
    seen["part"] = error_of(exchange.mixture, captures=True)
    exchange.abandon()
    num_channels, comm._num_channels = comm._num_channels, comm._next_channel
    seen["channels"] = error_of(lambda: comm.exchange(torch.ones(1, 6), ring, 0))
    comm._num_channels = num_channels
    steps(comm, 4, weights)
    seen["fixed"] = error_of(lambda: comm.exchange(weights, ring, 0).mixture(), captures=True)
    dist.barrier()
    seen["after"] = "consistent" if consistent(comm) else "inconsistent"
    return seen


def refused_at_the_start(rank: int) -> dict[str, str]:
    """What every rank says when one of them cannot connect."""

    def fail_on(chosen: int, then: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any) -> Any:
            found = then(*words)
            if rank == chosen:
                raise RuntimeError("no peer access\nand a long trace")
            return found

        return call

    seen = {}
    for name, chosen in (("_check_reach", 1), ("_empty", 0), ("_rendezvous", 1)):
        real = getattr(symmetric, name)
        setattr(symmetric, name, fail_on(chosen, real))
        seen[name] = error_of(lambda: symmetric.SymmetricCommunicator(None, CPU, timeout=60.0))
        setattr(symmetric, name, real)
    symmetric.MAX_RANKS = 1
    seen["too many"] = error_of(lambda: symmetric.SymmetricCommunicator(None, CPU, timeout=60.0))
    symmetric.MAX_RANKS = 32
    return seen


def alone(group: dist.ProcessGroup) -> dict[str, Any]:
    """One rank needs no other memory than its own, and no channel."""
    comm = symmetric.SymmetricCommunicator(group, CPU, timeout=1e-5)
    rows = comm.allocate((1, 3), torch.float32, CPU)
    rows += 2
    comm.average_(rows).wait()
    comm.exchange(rows, ddpcore.Ring(), 0).mixture().apply_(rows)
    return {"rows": rows.tolist(), "milliseconds": comm._milliseconds, "ways": (comm.transport, comm.description)}


def main() -> None:
    path, rank, world_size = join()
    replace_calls(rank)
    seen: dict[Any, Any] = {}
    for seed in range(2):
        delays.seed(10 * seed + rank)
        comm, events = events_of(CPU, pause, seed)
        dist.barrier()
        seen["events", seed] = events.wrong, events.num_done, consistent(comm)
        dist.barrier()
    own = [dist.new_group([one]) for one in range(world_size)][rank]
    seen["alone"], seen["at the start"] = alone(own), refused_at_the_start(rank)
    comm = symmetric.SymmetricCommunicator(None, CPU, timeout=60.0)
    seen["set-ups"], seen["while training"] = steady(comm), refused_while_training(comm)
    seen["replayed"] = {2: replayed(2, 60000), 4: replayed(4, 60000), 1: replayed(1, 200), 3: replayed(3, 200)}
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
