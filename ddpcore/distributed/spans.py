"""Named ranges of a training step: for torch's profiler, and as seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from ddpcore.comm.base import Communicator

NAMES = ("before_forward", "bucket_ready", "after_backward", "before_step", "after_step")
"""In torch's profiler each has the prefix ``ddpcore::``."""

_STARTS = ("before_forward", "bucket_ready")  # calls that may start a transfer and do not wait for it
_WAITS = ("after_backward", "before_step")  # calls that wait for it


class Spans:
    """Ranges of the calls of a strategy. A range costs about a microsecond, so they are always measured.

    Attributes:
        seconds: host seconds in all ranges so far. Ranges that wait for other ranks include the wait.
        overlapped: host seconds between a call that started a transfer to other processes and the call that waited for
            it, without ``seconds``. So at most this much communication was hidden behind computation.

    Args:
        comm: its ``bytes_sent`` says whether a call started a transfer.
    """

    def __init__(self, comm: Communicator) -> None:
        self.seconds = self.overlapped = 0.0
        self._comm, self._has_others = comm, len(comm.learners) < comm.num_learners
        self._names: list[str] = []  # of the ranges that are open, the outermost first
        self._began, self._sent = 0.0, 0
        self._open: tuple[float, float] | None = None  # the end of the range that started a transfer, seconds so far

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """The range ``ddpcore::name``. A range inside another one is counted once."""
        self._names.append(name)
        return self._profiled(name) if torch.autograd._profiler_enabled() else self

    @contextmanager
    def _profiled(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(f"ddpcore::{name}"), self:
            yield

    def __enter__(self) -> None:
        if len(self._names) == 1:
            self._began, self._sent = time.perf_counter(), self._comm.bytes_sent

    def __exit__(self, *error: object) -> None:
        name = self._names.pop()
        if self._names:
            return
        ended = time.perf_counter()
        if self._open is not None and name in _WAITS:
            since, seconds = self._open
            self.overlapped += self._began - since - (self.seconds - seconds)
            self._open = None
        self.seconds += ended - self._began
        if self._open is None and self._has_others and name in _STARTS and self._comm.bytes_sent > self._sent:
            self._open = ended, self.seconds
