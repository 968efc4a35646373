"""Live weights of ranks that share memory: each row has a lock, and a mark while it is written.

A lock is one byte of a file that all ranks have open (``fcntl.lockf``). The kernel releases the locks of a process that
dies. Rows are locked by ascending rank, so no two ranks wait for each other. A rank that dies while it writes leaves
its mark, so nobody uses a row that is written in part. A lock orders memory: the next holder sees all earlier writes.

Shapes: a row is ``[K, P]``: P weights of a learner, and K - 1 further copies.
"""

import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Job, LiveWeights, PairMean
from ddpcore.comm.shared import memory
from ddpcore.comm.shared.coordination import LINE_BYTES, Coordinator, Flags

_FIRST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3  # seconds between two attempts to lock a row


class SharedLiveWeights(LiveWeights):
    """One row ``[K, P]`` of each rank, which has filled it, in shared memory. The constructor is collective."""

    def __init__(self, coordinator: Coordinator, rows: Sequence[Tensor], rule: PairMean) -> None:
        self._coordinator, self._rows, self._rank, self._rule = coordinator, rows, coordinator.rank, rule
        num_bytes = LINE_BYTES * len(rows)
        file = memory.create_file(num_bytes) if self._rank == 0 else -1
        number = coordinator.arrive(f"the opening of {len(rows)} rows to all ranks", str(file).encode())
        coordinator.await_arrived(range(len(rows)), number)
        if self._rank != 0:
            try:
                file = memory.open_file(coordinator.pids[0], int(coordinator.handle_of(0)))
            except OSError as error:  # rank 0 died after it arrived
                coordinator.fail_to_read(0, number, error)
        self._file = file
        self._marks = Flags(mmap.mmap(file, num_bytes))  # of each row: 1 + the rank that writes it, else 0
        coordinator.finish(number)
        coordinator.await_finished(number)
        weakref.finalize(self, os.close, file)

    @override
    @torch.no_grad()
    def meet(self, learner: int, peer: int, job: Job) -> None:
        """RuntimeError: the peer is gone, or a rank has died in the middle of an average, or has failed elsewhere."""
        self._coordinator.check_present(peer, "after its last step: end training with a collective call on all ranks")
        with self._writing(sorted({learner, peer})):
            self._rule.meet_(self._rows[learner], None if peer == learner else self._rows[peer], job)

    @override
    def drift(self, learner: int, time: float) -> None:
        with self._writing([learner]):
            self._rule.drift_(self._rows[learner], time)

    @override
    def rows(self) -> Tensor:
        with self._writing([self._rank]):
            return self._rows[self._rank][None].clone()

    @override
    def settle(self) -> None:
        self._coordinator.await_arrived(range(len(self._rows)), self._coordinator.arrive("the wait for all learners"))

    @override
    def load(self, rows_LKP: Tensor) -> None:
        self.settle()
        with self._writing([self._rank]):
            self._rows[self._rank].copy_(rows_LKP[0])
        self.settle()

    @contextmanager
    def _writing(self, ranks: Sequence[int]) -> Iterator[None]:
        """Hold the locks of rows, and their marks. After an error inside, the marks stay."""
        locked = []
        try:
            for rank in ranks:
                self._lock(rank)
                locked.append(rank)
                if (mark := self._marks.read(rank)) != 0:
                    why = f"rank {mark - 1} is gone (it died or left) in the middle of an average"
                    lost = f"the weights of rank {rank} are lost"
                    self._coordinator.fail(f"{why}, so {lost}: begin at the last checkpoint")
            for rank in ranks:
                self._marks.post(rank, self._rank + 1)
            yield
            for rank in ranks:
                self._marks.post(rank, 0)
        finally:
            for rank in locked:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)

    def _lock(self, rank: int) -> None:
        deadline, pause = time.monotonic() + self._coordinator.timeout, _FIRST_PAUSE
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
            except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: another rank has it
                if time.monotonic() > deadline:
                    seconds = f"{self._coordinator.timeout:g} s"
                    self._coordinator.fail(f"the weights of rank {rank} were locked for {seconds}: is a rank stopped?")
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                return
