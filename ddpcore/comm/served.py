"""Live weights of ranks of a process group: a thread of each rank answers the others.

Each rank holds its own row. A meeting locks two rows, that of the lower rank first. So a rank that holds a row waits
only for rows of higher ranks, and no two ranks wait for each other. A rank whose lower peer asks for a meeting
computes the mean. If the higher peer asks, the row travels to it, and the mean travels back.

Shapes: P elements of a learner's row.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ddpcore import ops
from ddpcore.comm.live import LiveWeights

# Tags of messages: a request to the thread of a rank, and rows and means to it and from it. Two ranks may be in two
# meetings at once, one that each of them has asked for.
_REQUEST, _ASKS, _ANSWERS = 1, 2, 3
_MEETS, _LEAVES = 1.0, 0.0  # a request
_FOREVER = timedelta(days=365)
_farewells: list[tuple[Tensor, list[dist.Work]]] = []  # messages on their way: freed, they would not arrive


class ServedLiveWeights(LiveWeights):
    """One row of each rank. The constructor is collective, and so is the end: each thread ends when all have left.

    Args:
        group: of gloo, for these weights alone; any number of ranks above one.
        weights_LP: ``[1, P]``, of this rank; on a GPU a copy on the CPU travels.
        timeout: seconds that a living rank may let another one wait.
    """

    def __init__(self, group: dist.ProcessGroup, weights_LP: Tensor, timeout: float) -> None:
        self._device = weights_LP.device
        self._shared = _Row(group, weights_LP[0].to("cpu", copy=True), timedelta(seconds=timeout))
        self._received = torch.empty_like(self._shared.row)
        self._request = torch.tensor([_MEETS])
        threading.Thread(target=_serve, args=(self._shared,), name="ddpcore live weights", daemon=True).start()
        weakref.finalize(self, _leave, group)

    @override
    @torch.no_grad()
    def meet(self, learner: int, peer: int, step_P: Tensor, out_P: Tensor) -> None:
        """RuntimeError: the peer is gone or does not answer, or another rank has died in the middle of an average."""
        shared, received = self._shared, self._received
        if peer > learner:  # the own row is the first to be locked
            with shared.writing(f"an average with rank {peer}"):
                shared.send(self._request, peer, _REQUEST)
                shared.send(shared.row, peer, _ASKS)
                shared.receive(received, peer, _ANSWERS)
                self._end(received, step_P, out_P)
            return
        if peer < learner:
            with shared.naming(f"an average with rank {peer}"):
                shared.send(self._request, peer, _REQUEST)
                shared.receive(received, peer, _ANSWERS)
        with shared.writing(f"an average with rank {peer}"):
            if peer < learner:
                ops.mix_(received, [shared.row], 0.5, [0.5])
                shared.send(received, peer, _ASKS)
            self._end(received if peer < learner else shared.row, step_P, out_P)

    def _end(self, mean_P: Tensor, step_P: Tensor, out_P: Tensor) -> None:
        torch.add(mean_P, step_P.to("cpu"), out=self._shared.row)
        out_P.copy_(self._shared.row)

    @override
    def own(self) -> Tensor:
        with self._shared.writing("a copy of its weights"):
            return self._shared.row[None].to(self._device, copy=True)

    @override
    def settle(self) -> None:
        with self._shared.naming("the wait for all learners"):
            options = dist.BarrierOptions()
            options.timeout = self._shared.timeout
            self._shared.group.barrier(options).wait()
        with self._shared.writing("the wait for all learners"):  # its last meeting may not have ended on this rank
            return

    @override
    def load(self, weights_LP: Tensor) -> None:
        self.settle()
        with self._shared.writing("the loading of its weights"):
            self._shared.row.copy_(weights_LP[0])
        self.settle()


class _Row:
    """The row of this rank, which the program and the thread lock in turn.

    Attributes:
        group: of all ranks.
        row: ``[P]``, on the CPU.
        timeout: of a message in a meeting.
    """

    def __init__(self, group: dist.ProcessGroup, row: Tensor, timeout: timedelta) -> None:
        self.group, self.row, self.timeout = group, row, timeout
        self._lock = threading.Lock()
        self._failure: str | None = None  # why nobody may use the row

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Hold the lock of the row. After an error inside, the row cannot be used any more."""
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            try:
                with self.naming(what):
                    yield
            except BaseException as error:
                self._failure = str(error) or f"{what} was interrupted: begin at the last checkpoint"
                raise

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Name the operation in errors of messages inside."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        try:
            yield
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise RuntimeError(
                f"{what} failed on rank {self.group.rank()}: the other rank died, left, or did not come within "
                f"{self.timeout.total_seconds():g} s: end training with a collective call on all ranks, and after a "
                f"failure begin at the last checkpoint ({first})"
            ) from error

    def send(self, tensor: Tensor, rank: int, tag: int) -> None:
        """Send to a rank, and wait until the message has left."""
        self.group.send([tensor], rank, tag).wait(self.timeout)

    def receive(self, tensor: Tensor, rank: int, tag: int) -> None:
        """Overwrite the tensor with the next message of a rank."""
        self.group.recv([tensor], rank, tag).wait(self.timeout)


@torch.no_grad()
def _serve(shared: _Row) -> None:
    """Answer the others until all of them have left, or one has died in the middle of an average."""
    request, received, num_others = torch.empty(1), torch.empty_like(shared.row), shared.group.size() - 1
    with suppress(RuntimeError):  # the connections are closed; of a failure in a meeting, the row tells
        while num_others:
            work = shared.group.recv_anysource([request], _REQUEST)
            work.wait(_FOREVER)
            peer = work._source_rank()
            if float(request) == _LEAVES:
                num_others -= 1
                continue
            with shared.writing(f"an average with rank {peer}"):
                if peer < shared.group.rank():
                    shared.receive(received, peer, _ASKS)
                    ops.mix_(shared.row, [received], 0.5, [0.5])
                    shared.send(shared.row, peer, _ANSWERS)
                else:
                    shared.send(shared.row, peer, _ANSWERS)
                    shared.receive(shared.row, peer, _ASKS)


def _leave(group: dist.ProcessGroup) -> None:
    """Tell all others that this rank asks for no further meeting."""
    message = torch.tensor([_LEAVES])
    with suppress(RuntimeError):  # a rank that has ended needs no message
        works = [group.send([message], rank, _REQUEST) for rank in range(group.size()) if rank != group.rank()]
        _farewells.append((message, works))
