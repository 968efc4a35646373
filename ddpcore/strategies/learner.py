"""What one process trains: the learner (or the stack of virtual ones) that strategies move and diagnostics read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.comm.base import Communicator
from ddpcore.ops.dtypes import KERNEL_DTYPES
from ddpcore.parameters.flat import FlatParameters


@dataclass
class Learner:
    """The learner of a real rank, or all virtual learners of a process as rows.

    Attributes:
        flat: parameters and gradients, ``[L, P]``.
        comm: the connection to the other learners.
        optimizer: the user's.
        step: optimizer steps taken so far, the t of the equations.
        hooks_paused: while diagnostics run passes of their own, of which the strategy is not told.
        shares: float64 ``[n]``, how much each of all learners counts in an average of weights, their mean being 1; None
            where all count alike.
    """

    flat: FlatParameters
    comm: Communicator
    optimizer: torch.optim.Optimizer
    step: int = 0
    hooks_paused: bool = False
    shares: Tensor | None = None

    @torch.no_grad()
    def average_of(self, weights_LX: Tensor) -> Tensor:
        """The average ``[L, x]`` of all learners' weights or of some columns of them, rows alike. Collective."""
        average_LX = weights_LX.clone()
        if self.shares is not None:
            average_LX.mul_(self.shares[list(self.comm.learners), None].to(average_LX))
        self.comm.average_(average_LX).wait()
        return average_LX

    @torch.no_grad()
    def squared_distances(self) -> Tensor:
        """float64 ``[L]``: of each learner held here to the average of all, padding left out. Collective.

        By differences, which are exact where weights are close, and in one pass where a kernel knows the dtype.
        """
        flat, average_LP = self.flat, self.average_of(self.flat.param_LP)
        if average_LP.dtype not in KERNEL_DTYPES:
            apart_LP = average_LP.sub_(flat.param_LP)
            parts = [apart_LP[:, segment.offset : segment.offset + segment.numel] for segment in flat.segments]
            return torch.stack([part.double().square().sum(dim=1) for part in parts]).sum(dim=0)
        bounds = [bound for segment in flat.segments for bound in (segment.offset, segment.offset + segment.numel)]
        sums = [
            ops.noise_sums([row], [*bounds, flat.numel], average)[::2].sum()  # every second interval is padding
            for row, average in zip(flat.param_LP, average_LP, strict=True)
        ]
        return torch.stack(sums)
