"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, ClassVar


class StopSignal:
    """While it is entered, SIGINT and SIGTERM are taken note of, and a second one does what it always did.

    Outside the main thread, and of signals that the process ignores, nothing is heard. One that is entered inside
    another that was asked is asked from the start.

    Attributes:
        asked: whether a signal came.
        name: of the signal.
    """

    asked: bool = False
    name: str = ""
    _innermost: ClassVar[StopSignal | None] = None

    def __enter__(self) -> StopSignal:
        self._before: dict[signal.Signals, Any] = {}
        self._outer: StopSignal | None = None
        if threading.current_thread() is not threading.main_thread():
            return self
        self._outer, StopSignal._innermost = StopSignal._innermost, self
        if self._outer is not None and self._outer.asked:
            self.asked, self.name = True, self._outer.name
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()
        if StopSignal._innermost is self:
            StopSignal._innermost = self._outer

    def pass_on(self) -> None:
        """Send the signal again, after this one has been left, unless the one around it has heard it already."""
        if self.asked and not (self._outer is not None and self._outer.asked):
            signal.raise_signal(signal.Signals[self.name])

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked, self.name = True, signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
