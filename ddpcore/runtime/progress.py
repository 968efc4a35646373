"""Progress of a long task, on standard error."""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
except ImportError:  # the extra `train`: without it there are lines instead of a bar
    Progress = None  # type: ignore[assignment,misc]

SECONDS_BETWEEN_LINES = 10.0


class ProgressReport:
    """A bar with the time left if ``out`` is a terminal, else a line every ten seconds.

    ``what`` is the task, such as ``training``, of ``total`` steps, of which an earlier process has ``completed`` some.
    Ranks but the first are not ``shown``. ``out`` is standard error by default, and ``clock`` counts seconds.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        completed: int = 0,
        shown: bool = True,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._first, self._done = what, total, completed, completed
        self._out, self._clock = out or sys.stderr, clock
        self._started = self._last = clock()
        self._shown = shown
        self._bar: Any = None
        if shown and Progress is not None and self._out.isatty():
            columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(file=self._out), transient=True)
            self._task = self._bar.add_task(what, total=total, completed=completed)

    def __enter__(self) -> "ProgressReport":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, num_steps: int, text: str = "") -> None:
        """Report so many more steps as done. The text is shown beside the task."""
        self._done += num_steps
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=text or self._what)
            return
        now = self._clock()
        if self._shown and now - self._last >= SECONDS_BETWEEN_LINES:
            self._last, done = now, self._done - self._first
            left = "" if not done else f", about {(now - self._started) / done * (self._total - self._done):.0f} s left"
            about = f" ({text})" if text else ""
            print(f"{self._what}{about}: {self._done} of {self._total}{left}", file=self._out, flush=True)
