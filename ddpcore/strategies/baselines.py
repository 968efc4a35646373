"""What a user would otherwise run: one device alone, or torch's own DistributedDataParallel."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpcore.comm.base import Communicator
from ddpcore.comm.process import ProcessGroupCommunicator
from ddpcore.comm.virtual import VirtualCommunicator
from ddpcore.strategies.base import Baseline


class Single(Baseline):
    """A learner on its own: the model and the optimizer are left as they are, and nothing is ever exchanged."""

    name: ClassVar[str] = "single"

    def connect(self, group: dist.ProcessGroup | None) -> Communicator:
        """One learner."""
        return VirtualCommunicator(1)

    def wrap(self, model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
        """The model itself."""
        return model


class DDP(Baseline):
    """torch's DistributedDataParallel with its defaults, for comparison. Real ranks only.

    Args:
        bucket_cap_mb: of DistributedDataParallel; None is its default, 25 with a first bucket of 1.
    """

    name: ClassVar[str] = "ddp"

    def __init__(self, *, bucket_cap_mb: float | None = None) -> None:
        self.bucket_cap_mb = bucket_cap_mb

    def connect(self, group: dist.ProcessGroup | None) -> Communicator:
        """The ranks of the group."""
        if not dist.is_initialized():
            raise ValueError("ddp needs real ranks: start it with torchrun, or take ssgd for virtual learners")
        return ProcessGroupCommunicator(group)

    def wrap(self, model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
        """``DistributedDataParallel(model)``."""
        options: dict[str, Any] = {} if self.bucket_cap_mb is None else {"bucket_cap_mb": self.bucket_cap_mb}
        return DistributedDataParallel(model, process_group=group, **options)
