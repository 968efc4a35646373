"""Virtual learners: n rows of one buffer in this process. They are the reference implementation of real ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Communicator, Done, Exchange, PeerExchange, Work
from ddpcore.comm.errors import check_has_average
from ddpcore.comm.reductions import average_blocks_
from ddpcore.comm.traffic import average_bytes
from ddpcore.ops import StackedMixture, WeightAverage
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
    def average_(self, rows: Tensor, step: int | None = None) -> Work:
        return self.average_groups_(rows, self.num_learners, step)

    @override
    def form_groups(self, size: int) -> None:
        if self.membership is not None:
            super().form_groups(size)  # refuses

    @override
    def average_groups_(self, rows: Tensor, size: int, step: int | None = None) -> Work:
        check_has_average(rows)
        if size > 1:
            self.bytes_sent += average_bytes(rows[0], size)
            average_blocks_(rows, size)
        return Done()

    @override
    def exchange(self, weights_LP: Tensor, topology: Topology, step: int) -> Exchange:
        sent = len(topology.round(step, 0, self.num_learners).destinations)
        self.bytes_sent += sent * weights_LP.shape[1] * weights_LP.element_size()
        rows = self._rows_of(topology, step, weights_LP.device)
        return StackedExchange(rows, self.learners, lambda learner: topology.round(step, learner, self.num_learners))

    @override
    def gather(self, values: Tensor) -> Tensor:
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
    return (
        torch.from_numpy(mixing.offsets).to(device),
        torch.from_numpy(mixing.columns).to(device),
        torch.from_numpy(mixing.values.astype(np.float32)).to(device),
    )


class StackedExchange(PeerExchange):
    """An exchange between rows of one buffer. Args: the mixing matrix, and as for :class:`PeerExchange`."""

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
