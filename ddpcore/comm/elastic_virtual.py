"""Virtual learners that die by a script: the reference implementation of real ranks that die."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Done, Exchange, Work
from ddpcore.comm.errors import check_has_average
from ddpcore.comm.membership import NUM_TO_JOIN, Change, Membership
from ddpcore.comm.reductions import COLUMNS, sum_of
from ddpcore.comm.virtual import StackedExchange, VirtualCommunicator, csr_of
from ddpcore.topology.base import Topology
from ddpcore.topology.rounds import mixing_matrix


class ElasticVirtualCommunicator(VirtualCommunicator):
    """Connects the rows of one ``[L, P]`` buffer, of which n belong to members.

    Row j belongs to the learner with id j. A row of no member stays in the buffer: averages are written to it too, and
    nothing reads it.

    Args:
        num_rows: L.
    """

    membership: Membership

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self._num_rows = num_rows
        self.membership = Membership(tuple(range(num_rows)))
        self.description += ", which may die"
        self.num_operations = 0
        self._script: list[Change] = []

    @override
    def play(self, script: Iterable[Change]) -> None:
        for change in script:
            if change.operation < self.num_operations:
                raise ValueError(f"operation {change.operation} is over: {self.num_operations} is the next one")
            self._script.append(change)
        self._script.sort(key=lambda change: change.operation)

    @property
    def _rows(self) -> list[int]:
        return list(self.membership.members)

    @override
    def redrawn(self, topology: Topology) -> Topology:
        return self.membership.topology(topology)

    def _begin(self, step: int | None) -> None:
        """Begin an operation: apply the changes that are due."""
        while self._script and self._script[0].operation <= self.num_operations:
            change = self._script.pop(0)
            if change.joined:
                raise RuntimeError(f"{change}: learners join between two steps, and this is in the middle of one")
            members = {*self.membership.members, *change.joined}.difference(change.lost)
            self.membership.change(tuple(sorted(members)), self.num_operations, step)
            self._take_members()
        self.num_operations += 1

    @override
    def admit(self, step: int) -> int | None:
        """At the end of a step: let a learner join if the script says so. Returns its id."""
        if not self._script or not self._script[0].joined or self._script[0].operation > self.num_operations:
            return None
        (new,) = self._script.pop(0).joined
        self.membership.change(tuple(sorted((*self.membership.members, new))), self.num_operations, step)
        self._take_members()
        self.num_operations += NUM_TO_JOIN
        return new

    def _take_members(self) -> None:
        members = self.membership.members
        self.num_learners = len(members)
        self.learners = tuple(members.index(row) if row in members else 0 for row in range(self._num_rows))

    @override
    def broadcast_(self, rows: Tensor) -> None:
        self._begin(None)
        first = self._rows[0]
        rows.copy_(rows[first : first + 1].clone().expand_as(rows))

    @override
    def average_(self, rows: Tensor, step: int | None = None) -> Work:
        check_has_average(rows)
        self._begin(step)
        self.bytes_sent += (self.num_learners - 1) * rows[0].nbytes
        for columns in rows.split(COLUMNS, dim=1):
            living = [columns[row] for row in self._rows]
            columns.copy_(sum_of(living).div_(self.num_learners))
        return Done()

    @override
    def exchange(self, weights_LP: Tensor, topology: Topology, step: int) -> Exchange:
        self._begin(step)
        membership, members = self.membership, self.membership.members
        rounds = [membership.round(topology, step, row, members) for row in range(self._num_rows)]
        self.bytes_sent += len(rounds[members[0]].destinations) * weights_LP.shape[1] * weights_LP.element_size()
        rows = csr_of(mixing_matrix(rounds), weights_LP.device)
        return StackedExchange(rows, range(self._num_rows), rounds.__getitem__)

    @override
    def gather(self, values: Tensor) -> Tensor:
        self._begin(None)
        return values[self._rows]
