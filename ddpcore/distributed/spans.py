"""Named ranges of a training step: for torch's profiler, and as seconds for a program that asks for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ddpcore.comm.base import Communicator

NAMES = ("before_forward", "bucket_ready", "after_backward", "before_step", "after_step")
"""In torch's profiler each has the prefix ``ddpcore::``."""

_STARTS = ("before_forward", "bucket_ready")  # calls that may start a transfer and do not wait for it
_WAITS = ("after_backward", "before_step")  # calls that wait for it
_NOTHING = nullcontext()


class Spans:
    """Ranges of the calls of a strategy. Without a profiler and a recording they cost nearly nothing.

    Attributes:
        seconds: host seconds in all ranges since :meth:`start`; None: they are not measured. Ranges that wait for other
            ranks include the wait.
        overlapped: host seconds between a call that started a transfer to other processes and the call that waited for
            it, without ``seconds``. So at most this much communication was hidden behind computation.
        total: host seconds in all ranges so far, if there are other ranks: always measured.

    Args:
        comm: its ``bytes_sent`` says whether a call started a transfer.
    """

    def __init__(self, comm: Communicator) -> None:
        self.seconds: float | None = None
        self.overlapped = self.total = 0.0
        self._comm = comm
        self._has_others = len(comm.learners) < comm.num_learners
        self._is_inside = False
        self._depth, self._entered = 0, 0.0  # of ranges, for the total
        self._open: tuple[float, float] | None = None  # the end of the range that started a transfer, seconds so far

    def start(self) -> None:
        """Measure from here on."""
        self.seconds, self.overlapped, self._open = 0.0, 0.0, None

    def stop(self) -> None:
        """Measure no longer."""
        self.seconds = None

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """The range ``ddpcore::name``. A range inside another one is counted once."""
        measured = self.seconds is not None and not self._is_inside
        profiled = torch.autograd._profiler_enabled()
        if measured or profiled:
            return self._range(name, measured, profiled)
        return self if self._has_others else _NOTHING

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._entered = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.total += time.perf_counter() - self._entered

    @contextmanager
    def _range(self, name: str, measured: bool, profiled: bool) -> Iterator[None]:
        began, sent = time.perf_counter(), self._comm.bytes_sent
        self._is_inside = self._is_inside or measured
        try:
            with self, torch.profiler.record_function(f"ddpcore::{name}") if profiled else _NOTHING:
                yield
        finally:
            if measured:
                self._is_inside = False
                self._add(name, began, time.perf_counter(), self._comm.bytes_sent > sent)

    def _add(self, name: str, began: float, ended: float, has_sent: bool) -> None:
        if self.seconds is None:  # stopped meanwhile
            return
        if self._open is not None and name in _WAITS:
            since, seconds = self._open
            self.overlapped += began - since - (self.seconds - seconds)
            self._open = None
        self.seconds += ended - began
        if self._open is None and has_sent and self._has_others and name in _STARTS:
            self._open = ended, self.seconds
