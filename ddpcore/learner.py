"""What one process trains: the learner (or the stack of virtual ones) that strategies move and diagnostics read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddpcore.comm.base import Communicator
from ddpcore.flat import FlatParameters


@dataclass
class Learner:
    """The learner of a real rank, or all virtual learners of a process as rows.

    Attributes:
        flat: parameters and gradients, ``[L, P]``.
        comm: the connection to the other learners.
        optimizer: the user's.
        step: optimizer steps taken so far, the t of the equations.
        is_watched: while diagnostics run passes of their own, of which the strategy is not told.
    """

    flat: FlatParameters
    comm: Communicator
    optimizer: torch.optim.Optimizer
    step: int = 0
    is_watched: bool = False
