"""Virtual learners: all n of them rows of one buffer in this process. The executable reference of the real ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.comm.base import Communicator, Done, Exchange, Work, average_bytes
from ddpcore.ops import Mixture
from ddpcore.topology import Topology

Rows = tuple[Tensor, Tensor, Tensor]
"""Offsets, columns and values of a matrix in compressed rows."""


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

    def average_(self, rows: Tensor) -> Work:
        """See :class:`Communicator`. Learners are added in ascending order."""
        if self.num_learners > 1:
            self.bytes_sent += average_bytes(rows[0].numel() * rows.element_size(), self.num_learners)
            total = rows[0].clone()
            for row in rows[1:]:
                total += row
            rows.copy_(total.div_(self.num_learners))
        return Done()

    def exchange(self, weights_LP: Tensor, topology: Topology, step: int) -> Exchange:
        """See :class:`Communicator`."""
        sent = len(topology.round(step, 0, self.num_learners).destinations)
        self.bytes_sent += sent * weights_LP.shape[1] * weights_LP.element_size()
        return _StackedExchange(weights_LP, *self._rows_of(topology, step, weights_LP.device))

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
    def __init__(self, weights_LP: Tensor, offsets: Tensor, columns: Tensor, values: Tensor) -> None:
        self._weights_LP, self._rows = weights_LP, (offsets, columns, values)

    def mix_(self) -> Tensor:
        return ops.mix_stacked_(self._weights_LP, [], *self._rows)[:, None]

    def mixture(self) -> Mixture | None:
        return None
