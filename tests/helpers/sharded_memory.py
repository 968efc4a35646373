"""What tensors of a rank hold beyond those of FSDP2, with each strategy."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ddpcore
from ddpcore import Connection
from ddpcore.optim import FusedAdamW

HELD: dict[str, Callable[[], Any]] = {
    "ssgd": ddpcore.SSGD,
    "dpsgd": ddpcore.DPSGD,
    "dpsgd_atc": lambda: ddpcore.DPSGD(order="adapt_then_combine"),
    "local_sgd": lambda: ddpcore.LocalSGD(2),
    "outer": lambda: ddpcore.LocalSGD(2, outer=partial(torch.optim.SGD, lr=1.0)),
    "outer_momentum": lambda: ddpcore.LocalSGD(2, outer=partial(torch.optim.SGD, lr=0.7, momentum=0.9)),
}


def held() -> dict[int, Any]:
    """All memory that tensors of this process use, by address."""
    gc.collect()
    found = [getattr(one, "_local_tensor", one) for one in gc.get_objects() if issubclass(type(one), Tensor)]
    storages = sorted((one.untyped_storage() for one in found), key=lambda storage: int(storage.nbytes()))
    return {storage.data_ptr(): storage for storage in storages}  # the longest one at an address


def size(storages: dict[int, Any]) -> int:
    """The bytes of all of them; a shard is a part of the flat buffer."""
    total = end = 0
    for address, storage in sorted(storages.items()):
        total += max(0, address + storage.nbytes() - max(address, end))
        end = max(end, address + storage.nbytes())
    return total


def beyond_fsdp(mesh: DeviceMesh) -> dict[str, float]:
    """What tensors hold after a step beyond those of FSDP2 alone, in bytes for each parameter of the shards.

    The first turn counts what FSDP2 makes once.
    """
    found: dict[str, float] = {}
    for name, make in {"first": None, "alone": None, **HELD}.items():
        before = held()  # alive, so that no address is used again
        model = nn.Linear(512, 512)
        fully_shard(model, mesh=mesh["shard"])
        optimizer, connection = FusedAdamW(model.parameters()), Connection(transport="pg")
        if make is not None:
            ddpcore.distribute(model, optimizer, make(), group=mesh["learners"], connection=connection)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 512)).sum().backward()
            optimizer.step()
        numel = sum(parameter.to_local().numel() for parameter in model.parameters())
        found[name] = size({address: one for address, one in held().items() if address not in before}) / numel
    return {name: value - found["alone"] for name, value in found.items()}
