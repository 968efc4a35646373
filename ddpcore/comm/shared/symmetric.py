"""Real learners on the GPUs of one host, which wait for each other on their streams: the host waits for nothing.

Shapes: n learners, P elements of a learner's row. Every rank holds one learner (L = 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory
from typing_extensions import override

from ddpcore.comm.base import Exchange, PeerExchange, Work
from ddpcore.comm.errors import TIMEOUT_SECONDS, check_has_average
from ddpcore.comm.process import ProcessGroupCommunicator, gather_objects
from ddpcore.comm.reductions import average_share_
from ddpcore.comm.shared.coordination import Unreachable
from ddpcore.comm.shared.memory import Buffers
from ddpcore.comm.traffic import all_reduce_bytes
from ddpcore.topology.base import Topology
from ddpcore.topology.rounds import Round

MAX_RANKS = 32  # torch's barrier has one warp, and a thread for each rank
BARRIER, FIRST = 0, 1  # channels of signals: of averages, and the first one of exchanges
SET_UP = "the set-up of symmetric memory"
COLD = "a CUDA graph cannot begin with new memory of all ranks: take four steps before the capture"
_Made = TypeVar("_Made")


@dataclass
class _Snapshot:
    """A buffer on each rank for a row that others read, and two channels of signals.

    Attributes:
        views: the row of each rank.
        ready: the channel from the owner of a row to each reader: the row is ready.
        read: the channel from each reader to the owner: the row was read.
        readers: the ranks whose "read" this rank takes before it overwrites its row.
        sources: the ranks whose rows this rank reads.
        is_handed_out: whether the average that reads the others' rows was returned to the caller.
        used: the number of the exchange before which this rank had read the others' rows; infinite until then.
    """

    views: Mapping[int, Tensor]
    ready: int
    read: int
    readers: Sequence[int] = ()
    sources: Sequence[int] = ()
    is_handed_out: bool = False
    used: float = 0.0


class SymmetricCommunicator(ProcessGroupCommunicator):
    """Learner j is rank j of the group. Ranks read and write each other's device memory, by kernels on their streams.

    Broadcasts, gatherings, groups, and averages outside of memory from :meth:`allocate` are those of the process group.

    **Averages** run on a stream of their own, beside the backward pass. All ranks meet, each averages one share of the
    columns, added in ascending order, and writes it into the rows of all ranks, and they meet again.

    **Exchanges.** A rank copies its row into a snapshot, signals "ready" to each reader, and a reader takes that signal
    before its average reads the row. At its next exchange, when the average was used, the reader signals "read" to the
    owner. The owner takes the "read" of all readers before it overwrites the snapshot. A snapshot is free from the
    exchange after that on. There are two, or more if several exchanges are in progress.

    **No row is overwritten while it is read.** A signal is a mailbox of one for each channel and pair of ranks: putting
    waits until the mailbox is empty, taking until it is full. Each snapshot has channels of its own. For a pair,
    "ready" and "read" alternate: the owner puts the next "ready" after it took the "read", which the reader puts after
    it took the last "ready". So no put waits, and no signal is taken for an older one. A stream keeps the order of a
    copy, a signal and an average. This holds for any readers: a snapshot keeps those of its last use until they have
    read, also when the topology changes. A quarantined learner takes all signals and gives its own row the weight 0. An
    abandoned exchange takes its signals too. Exchanges that overlap have different snapshots.

    **No rank waits for ever** while all ranks live and call the same methods in the same order. Number the calls. A put
    waits for nothing. "Ready" is put by the call that begins the exchange, and taken by a later one. "Read" is put by a
    call before the one that takes it, because a snapshot is not free in the exchange that signals its "read". The ranks
    meet in the same call. So whatever a call waits for is in an earlier call or in the same meeting, and the earliest
    call that is not finished can always go on. The order holds for a rank whose streams run one after the other, too.

    **CUDA graphs.** A graph of whole steps may be replayed if each of its exchanges finds the snapshots as the one
    before it left them: the topology is fixed, and the steps are a multiple of two, the number of snapshots. A graph
    with another number of steps finds a full or empty mailbox and ends with the error of the timeout. Take four steps
    before the capture. All ranks replay it as often, at least once before another exchange.

    Args:
        group: a process group; None is the default group, which must be initialised.
        device: the GPU of this rank.
        timeout: seconds that a rank may let the others wait. Later kernels that wait end with an error of CUDA.

    Raises:
        ValueError: there is no process group; or, on every rank, the ranks cannot reach each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: float = TIMEOUT_SECONDS) -> None:
        super().__init__(group, timeout=timeout)
        self.transport, self.description = "symmetric", f"symmetric memory on one host, {self.num_ranks} ranks"
        self._milliseconds = max(1, math.ceil(1000 * timeout))  # 0 would be no limit
        self._shared, self._snapshots = Buffers(self.rank), dict[tuple[int, torch.dtype], list[_Snapshot]]()
        self._num_exchanges, self._next_channel = 0, FIRST
        if self.num_ranks == 1:
            return
        if self.num_ranks > MAX_RANKS:
            raise ValueError(f"symmetric memory connects {MAX_RANKS} ranks, not {self.num_ranks}: use --transport pg")
        self._device = _with_index(device)
        devices = gather_objects(self.group, self._device.index, SET_UP, timeout)
        self._agree(lambda: _check_reach(self._device, devices))
        self._pad, self._signals = self._meet(1)  # its signal pad has all signals
        self._num_channels = self._signals.get_signal_pad(self.rank).numel() // self.num_ranks
        self._side = _Side(self._device)

    @override
    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if self.num_ranks == 1 or num_bytes == 0:
            return super().allocate(shape, dtype, device)
        own, handle = self._meet(num_bytes)
        self._shared.add(own, self._views(handle, own))
        return own.view(dtype).view(shape)

    @override
    def average_(self, rows: Tensor, step: int | None = None) -> Work:
        """Learners are added in ascending order if the rows are in memory from :meth:`allocate`."""
        check_has_average(rows)
        found = self._shared.find(rows)
        if found is None:
            return super().average_(rows, step)
        columns = [found[1][rank] for rank in range(self.num_ranks)]
        self.bytes_sent += all_reduce_bytes(rows.nbytes, self.num_ranks)

        def average() -> None:
            self._signals.barrier(channel=BARRIER, timeout_ms=self._milliseconds)
            average_share_(columns, self.rank)
            self._signals.barrier(channel=BARRIER, timeout_ms=self._milliseconds)

        return _Average(self._side.run(average))

    @override
    def exchange(self, weights_LP: Tensor, topology: Topology, step: int) -> Exchange:
        if self.num_ranks == 1:
            return super().exchange(weights_LP, topology, step)
        weights, round_ = weights_LP[0], topology.round(step, self.rank, self.num_learners)
        if _is_capturing() and topology.period(self.num_learners) != 1:
            raise RuntimeError(
                f"a CUDA graph repeats the neighbours of step {step} and {topology!r} changes them: take a fixed "
                "topology, or do not capture the step"
            )
        snapshot = self._free_snapshot(weights)
        self._num_exchanges += 1
        self._note_read()
        for reader in snapshot.readers:
            self._signals.wait_signal(reader, channel=snapshot.read, timeout_ms=self._milliseconds)
        if round_.destinations:
            snapshot.views[self.rank].copy_(weights)
        for reader in round_.destinations:
            self._signals.put_signal(reader, channel=snapshot.ready, timeout_ms=self._milliseconds)
        snapshot.readers, snapshot.sources, snapshot.used = round_.destinations, round_.sources, math.inf
        self.bytes_sent += len(round_.destinations) * weights.nbytes
        return _SnapshotExchange(self, round_, snapshot)

    def _note_read(self) -> None:
        """Signal that the rows which were handed out were read: an average is used before the next exchange starts."""
        for snapshot in (one for known in self._snapshots.values() for one in known if one.is_handed_out):
            for source in snapshot.sources:
                self._signals.put_signal(source, channel=snapshot.read, timeout_ms=self._milliseconds)
            snapshot.is_handed_out, snapshot.used = False, self._num_exchanges

    def _free_snapshot(self, like: Tensor) -> _Snapshot:
        """Return the snapshot that was read first. Without a free one, all ranks make a new one. Collective."""
        known = self._snapshots.setdefault((like.numel(), like.dtype), [])
        free = [one for one in known if one.used < math.inf]
        if _is_capturing() and not all(one.used for one in free):
            raise RuntimeError(COLD)
        if not free:
            free = [self._new_snapshot(like) for _ in range(1 if known else 2)]
            known += free
        return min(free, key=lambda one: one.used)

    def _new_snapshot(self, like: Tensor) -> _Snapshot:
        ready, read = self._next_channel, self._next_channel + 1
        if read >= self._num_channels:
            raise RuntimeError(
                f"the exchanges of {self.num_ranks} ranks need {read + 1} channels of signals and torch has "
                f"{self._num_channels}: use --transport pg"
            )
        own, handle = self._meet(like.nbytes)
        self._next_channel += 2
        views = {rank: view.view(like.dtype) for rank, view in self._views(handle, own).items()}
        return _Snapshot(views, ready, read)

    def _meet(self, num_bytes: int) -> tuple[Tensor, _SymmetricMemory]:
        """Allocate zeros on each rank, and open those of the others. Collective. Unreachable: on every rank."""
        if _is_capturing():
            raise RuntimeError(COLD)
        own = self._agree(lambda: _empty(num_bytes, self._device))
        return own, self._agree(lambda: _rendezvous(own, self.group))

    def _views(self, handle: _SymmetricMemory, own: Tensor) -> dict[int, Tensor]:
        others = (rank for rank in range(self.num_ranks) if rank != self.rank)
        return {self.rank: own} | {rank: handle.get_buffer(rank, own.shape, own.dtype) for rank in others}

    def _agree(self, make: Callable[[], _Made]) -> _Made:
        """Return what ``make`` returns, or raise on every rank what it raises on one. Collective."""
        made, why = None, ""
        try:
            made = make()
        except (RuntimeError, AssertionError) as error:  # AssertionError: torch knows no such GPU
            why = f"rank {self.rank}: {str(error).partition(chr(10))[0]}"
        reasons = gather_objects(self.group, why, SET_UP, self.timeout)
        if any(reasons):
            reason = next(filter(None, reasons))
            raise Unreachable(f"symmetric memory does not connect these ranks: {reason}: use --transport pg")
        return cast(_Made, made)


@dataclass
class _Average(Work):
    join: Callable[[], None]

    @override
    def wait(self) -> None:
        self.join()


class _SnapshotExchange(PeerExchange):
    def __init__(self, comm: SymmetricCommunicator, round_: Round, snapshot: _Snapshot) -> None:
        super().__init__(comm.learners, lambda _: round_)
        self._comm, self._snapshot, self._is_captured, self._is_over = comm, snapshot, _is_capturing(), False

    @override
    def received(self) -> Mapping[int, Tensor]:
        comm, snapshot = self._comm, self._snapshot
        if self._is_over:
            raise RuntimeError("an exchange is used once and this one was: begin another")
        if _is_capturing() != self._is_captured:
            raise RuntimeError(
                "a CUDA graph has a part of an exchange only: capture whole steps of a strategy without staleness"
            )
        for source in snapshot.sources:
            comm._signals.wait_signal(source, channel=snapshot.ready, timeout_ms=comm._milliseconds)
        self._is_over = snapshot.is_handed_out = True
        return {source: snapshot.views[source] for source in snapshot.sources}


# What follows are all calls of CUDA, so that tests can replace them.


def _with_index(device: torch.device) -> torch.device:
    return torch.device(device.type, torch.cuda.current_device()) if device.index is None else device


def _check_reach(device: torch.device, devices: Sequence[int]) -> None:
    """RuntimeError or AssertionError: torch cannot connect this GPU and those of the other ranks."""
    backend = _SymmetricMemory.get_backend(device)
    if backend != "CUDA":
        raise RuntimeError(f"torch's symmetric memory is that of {backend} and not of CUDA (TORCH_SYMMMEM)")
    for other in set(devices) - {device.index}:
        if not torch.cuda.can_device_access_peer(device, other):
            raise RuntimeError(f"GPU {device.index} cannot reach the memory of GPU {other}")


def _empty(num_bytes: int, device: torch.device) -> Tensor:
    own = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device).zero_()
    torch.cuda.synchronize(device)  # the zeros must be written before other streams and ranks write
    return own


def _rendezvous(own: Tensor, group: dist.ProcessGroup) -> _SymmetricMemory:
    import torch.distributed._symmetric_memory as symmetric  # noqa: PLC0415  half a second that no other transport needs

    return symmetric.rendezvous(own, group)


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


class _Side:
    """A stream beside the current one of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def run(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run work after all that the current stream has been given. Returns what lets the then current one wait."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)
