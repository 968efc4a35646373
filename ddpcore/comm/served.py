"""Live weights of ranks of a process group: a thread of each rank answers the others.

Each rank holds its own row. A meeting locks two rows, the lower rank's row first. So a rank that holds a row waits
only for rows of higher ranks, and no two ranks wait for each other. A rank that a lower one asks computes the mean. If
a higher one asks, the weights travel to it, and the mean travels back. Further copies stay at home: the mean and
its own weights tell a rank how they move.

A rank that lets its weights go tells all others, and each of them replies. After the last reply nobody asks this rank
any more, and its thread ends.

Shapes: a row is ``[K, P]``: P weights of a learner, and K - 1 further copies.
"""

import atexit
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Job, LiveWeights, PairMean
from ddpcore.comm.reductions import average_pair_

# Tags of messages: to the thread of a rank; then of the weights or the mean, to the rank that is asked, and back. Two
# ranks may be in two meetings at once, one that each of them has asked for.
_TO_THREAD, _ASKS, _ANSWERS = 1, 2, 3
_MEETS, _LEAVES, _REPLIES = 1, 2, 3  # to a thread
_FOREVER = timedelta(days=365)
_LEAVE_SECONDS = 5.0  # for the replies; a rank that has died sends none
_ADVICE = "end training with a collective call on all ranks, and after a failure begin at the last checkpoint"


class ServedLiveWeights(LiveWeights):
    """One row of each rank. The constructor is collective, over a group of gloo that serves these weights alone.

    When the last reference to the object goes, this rank leaves: an average with it is then an error. The row is a copy
    of the weights ``[1, P]`` on the CPU. A living rank may let another one wait for ``timeout`` seconds.
    """

    def __init__(self, group: dist.ProcessGroup, weights_LP: Tensor, timeout: float, rule: PairMean) -> None:
        self._device = weights_LP.device
        self._shared = _Row(group, rule.first_rows(weights_LP.to("cpu"))[0], timedelta(seconds=timeout), rule)
        self._received = torch.empty_like(self._shared.row[0])
        thread = threading.Thread(target=_serve, args=(self._shared,), name="ddpcore live weights", daemon=True)
        thread.start()
        weakref.finalize(self, _leave, self._shared, thread, os.getpid())

    @override
    @torch.no_grad()
    def meet(self, learner: int, peer: int, job: Job) -> None:
        """RuntimeError: the peer is gone or does not answer, or another rank has died in the middle of an average."""
        shared, mean = self._shared, self._received
        step_P = (job.model - job.read).to("cpu")  # from a GPU this waits for the step, which must not hold a lock
        if peer < learner:  # the peer's row is the first to be locked
            shared.ask(peer)
            shared.receive(mean, peer, _ANSWERS)  # its weights, until they are the mean
        with shared.writing():
            if peer > learner:
                shared.ask(peer)
                shared.send(shared.row[0], peer, _ASKS)
                shared.receive(mean, peer, _ANSWERS)
            elif peer == learner:
                mean.copy_(shared.row[0])
            else:
                average_pair_(mean, shared.row[0])
                shared.send(mean, peer, _ASKS)
            shared.rule.apply_mean_(shared.row, mean)
            shared.row.add_(step_P)
            job.begin_next_(shared.row[0])

    @override
    def drift(self, learner: int, time: float) -> None:
        with self._shared.writing():
            self._shared.rule.drift_(self._shared.row, time)

    @override
    def rows(self) -> Tensor:
        with self._shared.writing():
            return self._shared.row[None].to(self._device, copy=True)

    @override
    def settle(self) -> None:
        options = dist.BarrierOptions()
        options.timeout = self._shared.timeout
        with self._shared.naming("the wait for all learners", "a rank"):
            self._shared.group.barrier(options).wait()
        with self._shared.writing():  # the last meeting of a peer may not have ended on this rank
            return

    @override
    def load(self, rows_LKP: Tensor) -> None:
        self.settle()
        with self._shared.writing():
            self._shared.row.copy_(rows_LKP[0])
        self.settle()


class _LeftError(RuntimeError):
    """The peer has left, so nothing was sent to it."""


class _Row:
    """The row ``[K, P]`` of this rank, which the program and the thread lock in turn, and messages about it."""

    def __init__(self, group: dist.ProcessGroup, row: Tensor, timeout: timedelta, rule: PairMean) -> None:
        self.group, self.row, self.timeout, self.rule = group, row, timeout, rule
        self.rank, self.others = group.rank(), set(range(group.size())) - {group.rank()}
        self.gone: set[int] = set()  # ranks that ask for nothing any more: they have left, or know that this one leaves
        self._lock = threading.Lock()
        # Orders what this rank sends to the thread of another one: after a reply it sends no request. The garbage
        # collector may call leave() while this thread holds it, so it is reentrant.
        self._order = threading.RLock()
        self._failure: str | None = None  # why nobody may use the row
        self._told: set[int] = set()  # ranks that know, or will know, that this one leaves
        self.sent: list[tuple[Tensor, dist.Work]] = []  # to threads; freed, a message would not arrive

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock of the row. After an error inside, the row cannot be used any more, unless nothing was sent."""
        with self._lock:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            try:
                yield
            except BaseException as error:
                if not isinstance(error, _LeftError):
                    self._failure = str(error) or "an average was interrupted: begin at the last checkpoint"
                raise

    @contextmanager
    def naming(self, what: str, whom: str = "it") -> Iterator[None]:
        """Name the operation in errors of messages inside."""
        try:
            yield
        except RuntimeError as error:
            first, seconds = str(error).partition("\n")[0], f"{self.timeout.total_seconds():g} s"
            why = f"{whom}, or one that it waits for, died, left or did not come within {seconds}"
            raise RuntimeError(f"{what} failed on rank {self.rank}: {why}: {_ADVICE} ({first})") from error

    def send(self, tensor: Tensor, rank: int, tag: int) -> None:
        with self.naming(f"an average with rank {rank}"):
            self.group.send([tensor], rank, tag).wait(self.timeout)

    def receive(self, tensor: Tensor, rank: int, tag: int) -> None:
        with self.naming(f"an average with rank {rank}"):
            self.group.recv([tensor], rank, tag).wait(self.timeout)

    def ask(self, peer: int) -> None:
        """Ask the thread of a peer for a meeting."""
        message, what = _word(_MEETS), f"an average with rank {peer}"
        with self._order:
            if peer in self.gone:
                raise _LeftError(f"{what} failed on rank {self.rank}: it has left: {_ADVICE}")
            with self.naming(what):
                work = self.group.send([message], peer, _TO_THREAD)
        with self.naming(what):
            work.wait(self.timeout)

    def leave(self) -> None:
        """Tell all others that this rank asks for nothing any more. Each of them replies, or leaves itself."""
        with self._order:
            self._told = self.others - self.gone
            for peer in self._told:
                self._tell(peer, _LEAVES)

    def has_left(self, peer: int) -> None:
        """Note that a peer has left, and reply, unless it gets word that this rank leaves, too."""
        with self._order:
            self.gone.add(peer)
            if peer not in self._told:
                self._tell(peer, _REPLIES)

    def _tell(self, peer: int, what: int) -> None:
        message = _word(what)
        with suppress(RuntimeError):  # a peer that has died needs no word
            self.sent.append((message, self.group.send([message], peer, _TO_THREAD)))


def _word(what: int) -> Tensor:
    return torch.full((1,), what, dtype=torch.int64, device="cpu")


@torch.no_grad()
def _serve(shared: _Row) -> None:
    """Answer the others until nobody asks any more, or until an error, which the program sees when it uses the row."""
    word, received = _word(0), torch.empty_like(shared.row[0])
    try:
        while shared.gone != shared.others:
            work = shared.group.recv_anysource([word], _TO_THREAD)
            work.wait(_FOREVER)
            peer = work._source_rank()
            if int(word) == _LEAVES:
                shared.has_left(peer)
            elif int(word) == _REPLIES:
                shared.gone.add(peer)
            else:
                with shared.writing():
                    if peer < shared.rank:
                        shared.receive(received, peer, _ASKS)
                        average_pair_(received, shared.row[0])
                        shared.send(received, peer, _ANSWERS)
                    else:
                        shared.send(shared.row[0], peer, _ANSWERS)
                        shared.receive(received, peer, _ASKS)
                    shared.rule.apply_mean_(shared.row, received)
        for _, work in shared.sent:  # wait until what was told has left
            with suppress(RuntimeError):
                work.wait(shared.timeout)
    except RuntimeError:  # closed connections too
        shared.leave()


_OF_PARENTS: list[_Row] = []


def _leave(shared: _Row, thread: threading.Thread, pid: int) -> None:
    """Tell all others, and wait for the thread: one that wakes up while the interpreter ends aborts the process."""
    if os.getpid() != pid:
        _OF_PARENTS.append(shared)  # its destructor would wait forever for threads that a forked process lacks
        return
    shared.leave()
    if threading.current_thread() is thread:  # the garbage collector runs in any thread
        atexit.register(thread.join, _LEAVE_SECONDS)
    else:
        thread.join(_LEAVE_SECONDS)
