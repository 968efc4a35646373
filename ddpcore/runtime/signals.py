"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar


class StopSignal:
    """A context manager that records the first SIGINT or SIGTERM, and calls ``then``; a second has its previous effect.

    It records nothing outside the main thread, or for signals that the process ignores. A nested one inherits a signal
    that the outer one has received.
    """

    asked: bool = False  # whether a signal was received
    name: str = ""  # of the signal
    _innermost: ClassVar[StopSignal | None] = None

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self._then = then

    def __enter__(self) -> StopSignal:
        self._before: dict[signal.Signals, Any] = {}
        self._outer: StopSignal | None = None
        if threading.current_thread() is not threading.main_thread():
            return self
        self._outer, StopSignal._innermost = StopSignal._innermost, self
        if self._outer is not None and self._outer.asked:
            self.asked, self.name = True, self._outer.name
            self._then()
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()
        if StopSignal._innermost is self:
            StopSignal._innermost = self._outer

    def pass_on(self) -> None:
        """Raise the signal again, after the context was left, unless the outer one has received it."""
        if self.asked and not (self._outer is not None and self._outer.asked):
            signal.raise_signal(signal.Signals[self.name])

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.asked, self.name = True, signal.Signals(number).name
        self._restore()
        self._then()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
