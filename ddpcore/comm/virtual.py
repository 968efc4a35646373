"""Virtual learners: all n of them rows of one buffer in this process. The executable reference of the real ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.comm.base import Communicator, Decode, Done, Exchange, Work, average_bytes, correction
from ddpcore.ops import Mixture
from ddpcore.topology import Round, Topology


class VirtualCommunicator(Communicator):
    """Connects the rows of one ``[n, P]`` buffer. Nothing is sent; ``bytes_sent`` is what ranks on gloo would send."""

    def __init__(self, num_learners: int) -> None:
        if num_learners < 1:
            raise ValueError(f"learners is {num_learners}: it must be at least 1")
        self.num_learners = num_learners
        self.learners = range(num_learners)
        self.description = f"{num_learners} virtual learners in one process"

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
        matrix = torch.from_numpy(topology.matrix(step, self.num_learners)).to(weights_LP.device, torch.float32)
        return _StackedExchange(weights_LP, matrix, lambda rank: topology.round(step, rank, self.num_learners))

    def gather(self, values: Tensor) -> Tensor:
        """See :class:`Communicator`."""
        return values


class _StackedExchange(Exchange):
    def __init__(self, weights_LP: Tensor, matrix: Tensor, plan_of: Callable[[int], Round]) -> None:
        self._weights_LP, self._matrix, self._plan_of = weights_LP, matrix, plan_of

    def mix_(self) -> Tensor:
        return ops.mix_stacked_(self._weights_LP, self._matrix)[:, None]

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
