"""Virtual learners: n rows of one buffer in this process. They are the reference implementation of real ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Communicator, Exchange, Work
from ddpcore.comm.groups import check_has_average
from ddpcore.comm.membership import NUM_TO_JOIN, Change, Membership
from ddpcore.comm.reductions import average_bytes, sum_of
from ddpcore.ops import StackedMixture, WeightAverage, average_
from ddpcore.topology.base import Topology
from ddpcore.topology.rounds import MixingMatrix, Round, mixing_matrix

Rows = tuple[Tensor, Tensor, Tensor]
"""Row offsets, columns and values of a sparse matrix (CSR)."""


class VirtualCommunicator(Communicator):
    """Connects the rows of one ``[n, P]`` buffer. Nothing is sent; ``bytes_sent`` counts what gloo ranks would send."""

    transport = "virtual"

    def __init__(self, num_learners: int) -> None:
        if num_learners < 1:
            raise ValueError(f"learners is {num_learners}: it must be at least 1")
        self.num_learners = num_learners
        self.learners = range(num_learners)
        self.description = f"{num_learners} virtual learners in one process"
        self._known: tuple[Topology | None, torch.device | None, Rows | None] = None, None, None

    @override
    def broadcast_(self, rows: Tensor) -> None:
        rows[1:].copy_(rows[0])

    @override
    def form_groups(self, size: int) -> None:
        if self.membership is not None:
            super().form_groups(size)  # refuses

    @override
    def average_(self, rows: Tensor, step: int | None = None, size: int | None = None) -> Work:
        check_has_average(rows)
        if (size := size or self.num_learners) > 1:
            self.bytes_sent += average_bytes(rows[0], size)
            average_([rows], size)
        return Work()

    @override
    def exchange(self, weights_LP: Tensor, topology: Topology, step: int, *, in_place: bool = False) -> Exchange:
        sent = len(topology.round(step, 0, self.num_learners).destinations)
        self.bytes_sent += sent * weights_LP.shape[1] * weights_LP.element_size()
        rows = self._rows_of(topology, step, weights_LP.device)
        return StackedExchange(rows, self.learners, lambda learner: topology.round(step, learner, self.num_learners))

    @override
    def gather(self, values: Tensor, step: int | None = None) -> Tensor:
        return values

    def _rows_of(self, topology: Topology, step: int, device: torch.device) -> Rows:
        """The mixing matrix of a step for ``mix_stacked_``. The last matrix of a static topology is cached."""
        known_topology, known_device, known = self._known
        if known is not None and known_topology is topology and known_device == device:
            return known
        rows = csr_of(topology.mixing_matrix(step, self.num_learners), device)
        if topology.period(self.num_learners) == 1:
            self._known = topology, device, rows
        return rows


def csr_of(mixing: MixingMatrix, device: torch.device) -> Rows:
    """A mixing matrix for ``mix_stacked_``."""
    arrays: list[np.ndarray] = [mixing.offsets, mixing.columns, mixing.values.astype(np.float32)]
    offsets, columns, values = (torch.from_numpy(one).to(device) for one in arrays)
    return offsets, columns, values


class StackedExchange(Exchange):
    """An exchange between rows of one buffer. Args: the mixing matrix, and as for :class:`Exchange`."""

    def __init__(self, rows: Rows, learners: Sequence[int], round_of: Callable[[int], Round]) -> None:
        super().__init__(learners, round_of)
        self._rows = rows

    @override
    def quarantine(self, learners: Set[int]) -> None:
        super().quarantine(learners)
        self._rows = csr_of(mixing_matrix(list(map(self.round_of, self.learners))), self._rows[0].device)

    @override
    def received(self) -> Mapping[int, Tensor]:
        return {}

    @override
    def mixture(self) -> WeightAverage:
        return StackedMixture([], *self._rows)


class ElasticVirtualCommunicator(VirtualCommunicator):
    """Connects the rows of one ``[L, P]`` buffer, of which n belong to members.

    Row j belongs to the learner with id j. A row of no member stays in the buffer: averages go there too, unread.
    """

    membership: Membership

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self._num_rows = num_rows
        self.membership = Membership(tuple(range(num_rows)))
        self.description += ", which may die"
        self.num_operations = 0
        self._script: list[Change] = []

    @property
    @override
    def ids(self) -> Sequence[int]:
        return range(self._num_rows)

    @override
    def play(self, script: Iterable[Change]) -> None:
        for change in script:
            if change.operation < self.num_operations:
                raise ValueError(f"operation {change.operation} is over: {self.num_operations} is the next one")
            self._script.append(change)
        self._script.sort(key=lambda change: change.operation)

    @override
    def reads(self, row: int) -> bool:
        due = [change for change in self._script if change.operation <= self.num_operations]
        return row in self.membership.members and not any(row in change.lost for change in due)

    @override
    def settle(self, step: int | None = None) -> None:
        while self._script and self._script[0].operation <= self.num_operations:
            change = self._script.pop(0)
            if change.joined:
                raise RuntimeError(f"{change}: learners join between two steps, and this is in the middle of one")
            self._take({*self.membership.members}.difference(change.lost), step)

    def _begin(self, step: int | None) -> None:
        self.settle(step)
        self.num_operations += 1

    @override
    def admit(self, step: int) -> int | None:
        if not self._script or not self._script[0].joined or self._script[0].operation > self.num_operations:
            return None
        (new,) = self._script.pop(0).joined
        self._take({*self.membership.members, new}, step)
        num_left = NUM_TO_JOIN
        while num_left:  # as ranks do, again after a death
            members = self.membership.members
            self._begin(None)
            num_left = num_left - 1 if members == self.membership.members else NUM_TO_JOIN
        return new

    def _take(self, ids: Set[int], step: int | None) -> None:
        members = tuple(sorted(ids))
        self.membership.change(members, self.num_operations, step)
        self.num_learners = len(members)
        self.learners = tuple(members.index(row) if row in members else 0 for row in range(self._num_rows))

    @override
    def broadcast_(self, rows: Tensor) -> None:
        self._begin(None)
        first = self.membership.members[0]
        rows.copy_(rows[first : first + 1].clone().expand_as(rows))

    @override
    def average_(self, rows: Tensor, step: int | None = None, size: int | None = None) -> Work:
        if size is not None:
            self.form_groups(size)  # refuses
        check_has_average(rows)
        self._begin(step)
        self.bytes_sent += (self.num_learners - 1) * rows[0].nbytes
        rows.copy_(sum_of([rows[row] for row in self.membership.members]).div_(self.num_learners))
        return Work()

    @override
    def exchange(self, weights_LP: Tensor, topology: Topology, step: int, *, in_place: bool = False) -> Exchange:
        self._begin(step)
        membership, members = self.membership, self.membership.members
        rounds = [membership.round(topology, step, row, members) for row in range(self._num_rows)]
        self.bytes_sent += len(rounds[members[0]].destinations) * weights_LP.shape[1] * weights_LP.element_size()
        rows = csr_of(mixing_matrix(rounds), weights_LP.device)
        return StackedExchange(rows, self.ids, rounds.__getitem__)

    @override
    def gather(self, values: Tensor, step: int | None = None) -> Tensor:
        self._begin(None)
        return values[list(self.membership.members)]
