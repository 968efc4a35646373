"""Groups of torch that are made without the default group: only their members take part, and torch knows no name."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_KINDS = ("gloo", "nccl")


def own_client(store: dist.Store) -> dist.Store:
    """The same store by a connection of its own, if it has connections: a wait of the program blocks its own."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.clone() if hasattr(store, "clone") else store


def own_group(
    backends: Mapping[str, str], store: dist.Store, rank: int, num: int, connect_seconds: float
) -> dist.ProcessGroup:
    """A group of ``num`` ranks. Collective over these.

    Calls of ``torch.distributed`` do not take it; its methods, such as ``allreduce``, do the same. ``set_timeout``
    limits the time of a call.

    Args:
        backends: ``gloo`` or ``nccl`` for each type of device, such as ``cpu``.
        store: a place that no other group uses.
        rank: of this process, below ``num``.
        num: of ranks.
        connect_seconds: until all have come, over gloo; NCCL connects in the first call.

    Raises:
        ValueError: another backend. Nothing was sent.
        RuntimeError: a rank did not come.
    """
    if unknown := sorted(set(backends.values()).difference(_KINDS)):
        raise ValueError(
            f"groups of ranks need gloo or nccl and the process group has {unknown[0]}: start it with these"
        )
    group = dist.ProcessGroup(store, rank, num)
    made: dict[str, tuple[Any, Any]] = {}
    for device, backend in backends.items():
        if backend not in made:
            made[backend] = _made(backend, dist.PrefixStore(backend, store), rank, num, connect_seconds)
        kind, own = made[backend]
        group._register_backend(torch.device(device), kind, own)
        group._set_default_backend(kind)
    return group


def _made(backend: str, store: dist.Store, rank: int, num: int, connect_seconds: float) -> tuple[Any, Any]:
    if backend == "nccl":
        nccl = dist.ProcessGroupNCCL(store, rank, num, dist.ProcessGroupNCCL.Options())
        return dist.ProcessGroup.BackendType.NCCL, nccl
    gloo = dist.ProcessGroupGloo(store, rank, num, timeout=timedelta(seconds=connect_seconds))
    return dist.ProcessGroup.BackendType.GLOO, gloo
