"""Virtual learners: all n of them rows of one buffer in this process. The executable reference of the real ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.comm.base import Communicator, Decode, Done, Exchange, Work, average_bytes, correction
from ddpcore.comm.sums import sum_of
from ddpcore.ops import Mixture
from ddpcore.topology import Round, Topology

Rows = tuple[Tensor, Tensor, Tensor]
"""Offsets, columns and values of a matrix in compressed rows."""

_COLUMNS = 2**20  # averaged at a time: a sum of all of them would take as much memory as a learner


class VirtualCommunicator(Communicator):
    """Connects the rows of one ``[n, P]`` buffer. Nothing is sent; ``bytes_sent`` is what ranks on gloo would send."""

    def __init__(self, num_learners: int) -> None:
        if num_learners < 1:
            raise ValueError(f"learners is {num_learners}: it must be at least 1")
        self.num_learners = num_learners
        self.learners = range(num_learners)
        self.description = f"{num_learners} virtual learners in one process"
        self._known: tuple[Topology | None, torch.device | None, Rows | None] = None, None, None

    def broadcast_(self, rows: Tensor) -> None:
        """See :class:`Communicator`."""
        rows[1:].copy_(rows[0])

    def average_(self, rows: Tensor, step: int | None = None) -> Work:
        """See :class:`Communicator`. Learners are added in ascending order."""
        if self.num_learners > 1:
            self.bytes_sent += average_bytes(rows[0], self.num_learners)
            for columns in rows.split(_COLUMNS, dim=1):
                columns.copy_(sum_of(columns).div_(self.num_learners))
        return Done()

    def exchange(self, weights_LP: Tensor, topology: Topology, step: int) -> Exchange:
        """See :class:`Communicator`."""
        sent = len(topology.round(step, 0, self.num_learners).destinations)
        self.bytes_sent += sent * weights_LP.shape[1] * weights_LP.element_size()
        rows = self._rows_of(topology, step, weights_LP.device)
        return _StackedExchange(weights_LP, rows, lambda rank: topology.round(step, rank, self.num_learners))

    def gather(self, values: Tensor) -> Tensor:
        """See :class:`Communicator`."""
        return values

    def _rows_of(self, topology: Topology, step: int, device: torch.device) -> Rows:
        """The mixing matrix of a step as ``mix_stacked_`` takes it; that of a static topology is made once."""
        known_topology, known_device, known = self._known
        if known is not None and known_topology is topology and known_device == device:
            return known
        mixing = topology.sparse_matrix(step, self.num_learners)
        rows = (
            torch.from_numpy(mixing.indptr.astype(np.int64)).to(device),
            torch.from_numpy(mixing.indices.astype(np.int64)).to(device),
            torch.from_numpy(mixing.data.astype(np.float32)).to(device),
        )
        if topology.period(self.num_learners) == 1:
            self._known = topology, device, rows
        return rows


class _StackedExchange(Exchange):
    def __init__(self, weights_LP: Tensor, rows: Rows, plan_of: Callable[[int], Round]) -> None:
        self._weights_LP, self._rows, self._plan_of = weights_LP, rows, plan_of

    def mix_(self) -> Tensor:
        return ops.mix_stacked_(self._weights_LP, [], *self._rows)[:, None]

    def mixture(self) -> Mixture | None:
        return None

    def correct_(self, weights_LP: Tensor, published_LP: Tensor, factor: float, decode: Decode | None = None) -> None:
        """Each learner's own weights change and published rows are read: one after the other is all at once."""
        for rank, weights in enumerate(weights_LP):
            plan = self._plan_of(rank)
            mixture = correction(plan, published_LP[rank], [published_LP[source] for source in plan.sources], factor)
            ops.mix_(weights, mixture.peers, mixture.self_weight, mixture.peer_weights)

    def correction(self, published_LP: Tensor, factor: float, decode: Decode | None = None) -> Mixture | None:
        return None

    def abandon(self) -> None:
        return
