"""Averages of columns in memory that ranks share: a rank only says that it has begun one, and who waits computes.

Shapes: n ranks that average, P columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Work
from ddpcore.comm.reductions import average_share_
from ddpcore.comm.shared.coordination import NUM_TEXTS, Coordinator
from ddpcore.comm.shared.memory import Memory


class Averages:
    """Averages among some ranks, in the order in which they begin. No other rank takes part.

    Args:
        coordinator: of these ranks; other operations of theirs may use it too.
        memory: the shared memory.
        ranks: their numbers, ascending.
    """

    def __init__(self, coordinator: Coordinator, memory: Memory, ranks: Sequence[int]) -> None:
        self.coordinator, self.ranks = coordinator, ranks
        self._memory = memory
        self._pending: deque[_Average] = deque()

    def begin(self, text: str, columns: list[Tensor]) -> Work:
        """Begin to average the columns ``[P]`` of each rank, added in ascending order. ``text`` describes them."""
        if len(self._pending) >= NUM_TEXTS // 2:  # the others must still be able to read its text
            self.complete(self._pending[0].number)
        self._memory.publish()
        work = _Average(self, self.coordinator.arrive(text), columns)
        self._pending.append(work)
        return work

    def share_(self, columns: list[Tensor]) -> None:
        """Average this rank's share of the columns ``[P]`` of each rank."""
        average_share_(columns, self.ranks.index(self.coordinator.rank))

    def complete(self, number: int) -> None:
        """Finish the averages up to an operation, and the later ones that all ranks have begun."""
        coordinator, pending = self.coordinator, self._pending
        while pending and (pending[0].number <= number or coordinator.have_arrived(pending[0].number)):
            coordinator.await_arrived(self.ranks, pending[0].number)
            self.share_(pending[0].columns)
            self._memory.publish()
            coordinator.finish(pending[0].number)
            pending.popleft()
        coordinator.await_finished(number)

    def complete_all(self) -> None:
        """Finish all averages that have begun."""
        if self._pending:
            self.complete(self._pending[-1].number)


class _Average(Work):
    def __init__(self, averages: Averages, number: int, columns: list[Tensor]) -> None:
        self._averages, self.number, self.columns = averages, number, columns

    @override
    def wait(self) -> None:
        self._averages.complete(self.number)
