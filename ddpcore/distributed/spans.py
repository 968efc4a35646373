"""Named ranges of a training step: for torch's profiler, and as seconds for a program that asks for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

NAMES = ("before_forward", "bucket_ready", "after_backward", "before_step", "after_step")
"""In torch's profiler each has the prefix ``ddpcore::``."""


_NOTHING = nullcontext()


class Spans:
    """Ranges of the calls of a strategy. Without a profiler and a recording they cost nearly nothing.

    Attributes:
        seconds: host seconds in all ranges since it was set to 0.0; None: they are not measured. Ranges that wait for
            other ranks include the wait.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._is_inside = False

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """The range ``ddpcore::name``. A range inside another one is counted once."""
        measured = self.seconds is not None and not self._is_inside
        profiled = torch.autograd._profiler_enabled()
        return self._range(name, measured, profiled) if measured or profiled else _NOTHING

    @contextmanager
    def _range(self, name: str, measured: bool, profiled: bool) -> Iterator[None]:
        started, self._is_inside = time.perf_counter(), self._is_inside or measured
        try:
            with torch.profiler.record_function(f"ddpcore::{name}") if profiled else _NOTHING:
                yield
        finally:
            if measured:
                self._is_inside = False
                if self.seconds is not None:
                    self.seconds += time.perf_counter() - started
