"""Averages of columns in memory that ranks share: a rank only says that it has begun one, and who waits computes.

Shapes: n ranks that average, P columns.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from ddpcore.comm.base import Work
from ddpcore.comm.reductions import average_share_
from ddpcore.comm.shared.coordination import NUM_TEXTS, Coordinator
from ddpcore.comm.shared.memory import Memory

_SLICE_SECONDS = 0.01  # the thread of a rank looks this often whether it must end


class _Begun(NamedTuple):
    number: int
    columns: list[Tensor]


class Averages:
    """Averages among some ranks, ascending, in the order in which they begin. No other rank takes part.

    ``in_thread``: a thread of this rank computes each average as soon as all ranks have begun it. Else the rank
    computes it when it waits for it. The bits are the same.
    """

    def __init__(
        self, coordinator: Coordinator, memory: Memory, ranks: Sequence[int], *, in_thread: bool = False
    ) -> None:
        self.coordinator, self._memory, self.ranks = coordinator, memory, ranks
        self._pending: deque[_Begun] = deque()
        self._lock = threading.Lock()  # who holds it computes
        self._begun = threading.Semaphore(0)
        if in_thread:
            is_closed = threading.Event()
            args = weakref.ref(self), self._begun, is_closed
            thread = threading.Thread(target=_compute, args=args, name="ddpcore averages", daemon=True)
            thread.start()
            weakref.finalize(self, _end, thread, self._begun, is_closed)

    def begin(self, text: str, columns: list[Tensor]) -> Work:
        """Begin to average the columns ``[P]`` of each rank, added in ascending order. ``text`` describes them."""
        try:  # not len(): the thread may complete averages meanwhile
            oldest: _Begun | None = self._pending[-NUM_TEXTS // 2]
        except IndexError:
            oldest = None
        if oldest is not None:  # the others must still be able to read its text
            self.complete(oldest.number)
        self._memory.publish()
        number = self.coordinator.arrive(text)
        self._pending.append(_Begun(number, columns))
        self._begun.release()
        return Work(lambda: self.complete(number))

    def share_(self, columns: list[Tensor]) -> None:
        """Average this rank's share of the columns ``[P]`` of each rank."""
        average_share_(columns, self.ranks.index(self.coordinator.rank))

    def complete(self, number: int) -> None:
        """Finish the averages up to an operation, and the later ones that all ranks have begun."""
        self._compute(number)
        self.coordinator.await_finished(number)

    def complete_all(self) -> None:
        """Finish all averages that have begun."""
        with self._lock:
            last = self._pending[-1] if self._pending else None
        if last is not None:
            self.complete(last.number)

    def compute_next(self, seconds: float) -> bool:
        """Compute what all ranks have begun, after a wait for the next average. Returns whether any is left."""
        with self._lock:
            first = self._pending[0] if self._pending else None
        if first is not None and self.coordinator.have_arrived(first.number, seconds):
            self._compute(-1)
        return bool(self._pending)

    def _compute(self, number: int) -> None:
        """Compute the averages up to an operation, for which this waits, and the later ones that all have begun."""
        coordinator, pending = self.coordinator, self._pending
        with self._lock:
            while pending:
                first = pending[0]
                if first.number <= number:
                    coordinator.await_passed(self.ranks, first.number)
                elif not coordinator.have_arrived(first.number):
                    return
                coordinator.check_same(self.ranks, first.number)
                try:
                    pending.popleft()  # now: columns that are half added must not be added again
                    self.share_(first.columns)
                    self._memory.publish()
                    coordinator.finish(first.number)
                except BaseException as error:  # an interrupt, too
                    with suppress(RuntimeError):
                        why = str(error).partition("\n")[0]
                        what = f"{type(error).__name__} ({why})" if why else type(error).__name__
                        coordinator.fail(f"rank {coordinator.rank} was stopped in the middle of an average by {what}")
                    raise


def _compute(reference: weakref.ref[Averages], begun: threading.Semaphore, is_closed: threading.Event) -> None:
    """The thread of a rank. It keeps no average alive. Its errors are raised where the rank waits next."""
    while begun.acquire() and not is_closed.is_set():
        is_left = True
        while is_left and not is_closed.is_set():
            averages = reference()
            try:
                is_left = averages is not None and averages.compute_next(_SLICE_SECONDS)
            except Exception:
                return
            del averages


def _end(thread: threading.Thread, begun: threading.Semaphore, is_closed: threading.Event) -> None:
    """End the thread. One that wakes up while the interpreter ends would abort the process."""
    is_closed.set()
    begun.release()
    if thread is not threading.current_thread():
        thread.join()
