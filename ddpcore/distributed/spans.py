"""Named ranges of a training step: for torch's profiler, and as seconds for a program that asks for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

NAMES = ("before_forward", "bucket_ready", "after_backward", "before_step", "after_step")
"""In torch's profiler each has the prefix ``ddpcore::``."""


class Spans:
    """Ranges of the calls of a strategy. Without a profiler and a recording they cost nearly nothing.

    Attributes:
        seconds: host seconds in all ranges since it was set to 0.0; None: they are not measured. Ranges that wait for
            other ranks include the wait.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._is_inside = False

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """The range ``ddpcore::name``. A range inside another one is counted once."""
        profiled = torch.autograd._profiler_enabled()
        measured = self.seconds is not None and not self._is_inside
        if not profiled and not measured:
            yield
            return
        started, self._is_inside = time.perf_counter(), self._is_inside or measured
        try:
            if profiled:
                with torch.profiler.record_function(f"ddpcore::{name}"):
                    yield
            else:
                yield
        finally:
            if measured:
                self._is_inside = False
                if self.seconds is not None:
                    self.seconds += time.perf_counter() - started
