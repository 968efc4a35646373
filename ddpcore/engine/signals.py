"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Listener:
    """While it is entered, SIGINT and SIGTERM are taken note of, and a second one does what it always did.

    Outside the main thread, and of signals that the process ignores, nothing is heard.

    Attributes:
        asked: whether a signal came.
        name: of the signal.
    """

    asked: bool = False
    name: str = ""

    def __enter__(self) -> Listener:
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked, self.name = True, signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
