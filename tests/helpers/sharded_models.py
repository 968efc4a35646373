"""Models that ``fully_shard``, HSDP, ``replicate`` and tensor parallelism shard, for ``sharded_ranks``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Odd sizes: rows of 7 and 3 are divided unevenly, and one rank of two has none of a vector of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 7), nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    def __init__(self, *, tied: bool = False, checkpointed: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(5) if norm else nn.LayerNorm(5)
        self.head = nn.Linear(5, 3)
        self.checkpointed, self.tied = checkpointed, tied
        if tied:
            self.other = nn.Linear(5, 3, bias=False)
            self.other.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        x = self.norm(x)
        return self.head(x) + self.other(x) if self.tied else self.head(x)


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def sharded(model: Net, mesh: DeviceMesh, **options: Any) -> Net:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def compiled(model: Net, mesh: DeviceMesh) -> Net:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")
    return sharded(model, mesh)


def hybrid(model: Net) -> Net:
    """HSDP inside a learner: its two ranks are replicas of one shard."""
    names = ("learners", "replicate", "shard")
    return sharded(model, DeviceMesh("cpu", torch.arange(4).view(2, 2, 1), mesh_dim_names=names)["replicate", "shard"])


def frozen(model: Net, mesh: DeviceMesh) -> Net:
    model.blocks[0].requires_grad_(False)
    return sharded(model, mesh)


def mixed(**options: Any) -> Net:
    """Tied weights, and a frozen block."""
    model = net(tied=True, **options)
    model.blocks[0].requires_grad_(False)
    return model


FEATURES: dict[str, Callable[[DeviceMesh], nn.Module]] = {
    "plain": lambda mesh: sharded(net(), mesh),
    "kept": lambda mesh: sharded(net(), mesh, reshard_after_forward=False),
    "bf16": lambda mesh: sharded(
        net(), mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "tied": lambda mesh: sharded(net(tied=True), mesh),
    "checkpointed": lambda mesh: sharded(net(checkpointed=True), mesh),
    "compiled": lambda mesh: compiled(net(), mesh),
    "frozen": lambda mesh: frozen(net(), mesh),
    "hsdp": lambda mesh: hybrid(net()),
    "replicate": lambda mesh: replicate(net(), mesh=mesh),
    "tensor_parallel": lambda mesh: tensor_parallel(mesh),
    "mixed": lambda mesh: sharded(mixed(), mesh),
    "double": lambda mesh: sharded(net().double(), mesh),
    "batch_norm": lambda mesh: sharded(net(norm=True), mesh),
}
