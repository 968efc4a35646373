"""Ranks on several hosts: ranks of one host share memory, and a process group connects hosts.

Each edge of a topology goes one of the two ways. The rows that arrive are added in the order of the topology, so an
average has the same bits as over either way alone, and as with virtual learners.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Exchange, Work
from ddpcore.comm.process import ProcessGroupCommunicator
from ddpcore.comm.shared.segments import SharedMemoryCommunicator
from ddpcore.runtime.launch import TIMEOUT_SECONDS
from ddpcore.topology.base import Topology
from ddpcore.topology.describe import edges_of
from ddpcore.topology.rounds import Round


class MixedCommunicator(ProcessGroupCommunicator):
    """Learner j is rank j of the group. Exchanges inside a host go by shared memory, those between hosts by the group.

    Averages of groups go by shared memory if each group is on one host. All else goes by the process group: averages of
    all ranks, broadcasts, gatherings, and rows that change without waiting.

    Args:
        group, timeout: see :class:`ProcessGroupCommunicator`.
        hosts: of each rank, a text that is equal for two ranks of one host.

    ValueError: there is no process group, or ``hosts`` has not one text for each rank; or, on every rank, ranks of one
    host cannot reach each other's memory.
    """

    bytes_by_group: int = 0  # that this learner has sent over the process group

    def __init__(self, group: dist.ProcessGroup | None, hosts: Sequence[str], timeout: float = TIMEOUT_SECONDS) -> None:
        super().__init__(group, timeout=timeout)
        self.transport = "mixed"
        if len(hosts) != (num := self.num_learners):
            raise ValueError(f"hosts names {len(hosts)} hosts and there are {num} ranks: give one for each rank")
        self._hosts = tuple(hosts)
        on_host = [other for other, host in enumerate(hosts) if host == hosts[self.rank]]
        self._near = SharedMemoryCommunicator(self.group, timeout, on_host)
        self._sizes_on_host: set[int] = set()  # of groups
        self._between = self.description
        self._describe("", "")

    def _describe(self, near: str, far: str) -> None:
        num = len(set(self._hosts))
        near, far = f"shared memory inside a host{near}", f"between hosts{far} and for averages of all ranks"
        self.description = f"{num} host{'' if num == 1 else 's'}: {near}, {self._between}, {far}"

    @override
    def note_topology(self, topology: Topology) -> None:
        self._describe(*(f" ({num} edge{'' if num == 1 else 's'})" for num in count_edges(topology, self._hosts)))

    @property
    @override
    def bytes_sent(self) -> int:
        return self._near.bytes_sent + self.bytes_by_group

    @bytes_sent.setter
    def bytes_sent(self, num: int) -> None:
        self.bytes_by_group = num - self._near.bytes_sent

    @override
    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._near.allocate(shape, dtype, device)

    @override
    def form_groups(self, size: int) -> None:
        blocks = (self._hosts[first : first + size] for first in range(0, self.num_learners, size))
        if all(len(set(block)) == 1 for block in blocks):  # the same on all ranks
            self._near.form_groups(size)
            self._sizes_on_host.add(size)
        else:
            super().form_groups(size)

    @override
    def average_(self, rows: Tensor, step: int | None = None, size: int | None = None) -> Work:
        if size in self._sizes_on_host:
            return self._near.average_(rows, step, size)
        return super().average_(rows, step, size)

    @override
    def exchange(self, weights_LP: Tensor, topology: Topology, step: int, *, in_place: bool = False) -> Exchange:
        with self.report_failures_to_host():
            from_far = super().exchange(weights_LP, _Edges(topology, self._hosts, inside=False), step)
        from_near = self._near.exchange(weights_LP, _Edges(topology, self._hosts, inside=True), step, in_place=in_place)
        return _MixedExchange(self, topology.round(step, self.rank, self.num_learners), from_near, from_far)

    @contextmanager
    def report_failures_to_host(self) -> Iterator[None]:
        """Inside, an error of the process group is raised on the other ranks of the host, too: they wait for this one.

        Otherwise they would name this rank, which ends, and not the one that failed first.
        """
        try:
            yield
        except RuntimeError as error:
            self._near.fail(str(error))


class _MixedExchange(Exchange):
    def __init__(self, comm: MixedCommunicator, round_: Round, near: Exchange, far: Exchange) -> None:
        super().__init__(comm.learners, lambda _: round_)
        self._comm, self._near, self._far = comm, near, far

    @override
    def received(self) -> Mapping[int, Tensor]:
        near = self._near.received()
        with self._comm.report_failures_to_host():
            return {**near, **self._far.received()}

    @override
    def new_row(self) -> Tensor | None:
        return self._near.new_row()

    @override
    def abandon(self) -> None:
        self._near.abandon()
        with self._comm.report_failures_to_host():
            self._far.abandon()


@dataclass(frozen=True)
class _Edges(Topology):
    """The edges of a topology inside hosts, or those between hosts."""

    whole: Topology
    hosts: tuple[str, ...]
    inside: bool

    @override
    def round(self, step: int, rank: int, num_learners: int) -> Round:
        turn = self.whole.round(step, rank, num_learners)
        weight_of = {one: share for one, share in zip(turn.sources, turn.weights, strict=True) if self._has(rank, one)}
        destinations = tuple(other for other in turn.destinations if self._has(rank, other))
        return Round(turn.self_weight, tuple(weight_of), tuple(weight_of.values()), destinations)

    def _has(self, rank: int, other: int) -> bool:
        return (self.hosts[rank] == self.hosts[other]) == self.inside

    @override
    def period(self, num_learners: int) -> int | None:
        return self.whole.period(num_learners)


def count_edges(topology: Topology, hosts: Sequence[str]) -> tuple[int, int]:
    """Edges inside hosts and between them. An edge is a pair of learners of which one reads from the other."""
    edges = {(min(edge), max(edge)) for edge in edges_of(topology, len(hosts))}
    inside = sum(hosts[one] == hosts[other] for one, other in edges)
    return inside, len(edges) - inside
