"""The baselines: one device alone, and torch's own DistributedDataParallel."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from ddpcore.comm.base import Communicator
from ddpcore.comm.process import ProcessGroupCommunicator
from ddpcore.comm.virtual import VirtualCommunicator
from ddpcore.strategies.base import Baseline


class Single(Baseline):
    """One learner. The model and the optimizer stay as they are, and nothing is sent."""

    name: ClassVar[str] = "single"

    @override
    def connect(self, group: dist.ProcessGroup | None) -> Communicator:
        return VirtualCommunicator(1)

    @override
    def wrap(self, model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
        return model


class DDP(Baseline):
    """torch's DistributedDataParallel with its defaults. It needs real ranks.

    Args:
        bucket_cap_mb: see DistributedDataParallel. None is its default: 25 MB, and 1 MB for the first bucket.
    """

    name: ClassVar[str] = "ddp"

    def __init__(self, *, bucket_cap_mb: float | None = None) -> None:
        self.bucket_cap_mb = bucket_cap_mb

    @override
    def connect(self, group: dist.ProcessGroup | None) -> Communicator:
        if not dist.is_initialized():
            raise ValueError("ddp needs real ranks: start it with torchrun, or take ssgd for virtual learners")
        return ProcessGroupCommunicator(group)

    @override
    def wrap(self, model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
        options: dict[str, Any] = {} if self.bucket_cap_mb is None else {"bucket_cap_mb": self.bucket_cap_mb}
        return DistributedDataParallel(model, process_group=group, **options)
