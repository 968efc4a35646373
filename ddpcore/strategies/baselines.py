"""The baselines: one device alone, and torch's own DistributedDataParallel."""

from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from ddpcore.comm.base import Communicator
from ddpcore.comm.process import ProcessGroupCommunicator
from ddpcore.comm.virtual import VirtualCommunicator
from ddpcore.options.typed import check_range
from ddpcore.parameters.shards import is_dtensor
from ddpcore.strategies.base import Baseline, Traits


class Single(Baseline):
    """One learner. The model and the optimizer stay as they are, and nothing is sent."""

    name: ClassVar[str] = "single"
    traits: ClassVar[Traits] = Traits(
        transports=("virtual",), most_learners=1, no_deaths="it ends when its process dies: take 'raise'"
    )

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
    traits: ClassVar[Traits] = Traits(
        averages_gradients=True,
        stays_identical=True,
        transports=("pg",),
        no_mean="ddp hides its averages",
        no_deaths="it ends when a rank dies: take 'raise', or another strategy",
    )

    def __init__(self, *, bucket_cap_mb: float | None = None) -> None:
        check_range("ddp: bucket_cap_mb", bucket_cap_mb, above=0)
        self.bucket_cap_mb = bucket_cap_mb

    @override
    def connect(self, group: dist.ProcessGroup | None) -> Communicator:
        if not dist.is_initialized():
            raise ValueError("ddp needs real ranks: start it with torchrun, or take ssgd for virtual learners")
        return ProcessGroupCommunicator(group)

    @override
    def wrap(self, model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
        if sharded := [name for name, parameter in model.named_parameters() if is_dtensor(parameter)]:
            raise ValueError(f"ddp trains whole models, and parameter {sharded[0]} is a DTensor: take ssgd")
        options: dict[str, Any] = {} if self.bucket_cap_mb is None else {"bucket_cap_mb": self.bucket_cap_mb}
        return DistributedDataParallel(model, process_group=group, **options)
