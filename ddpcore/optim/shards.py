"""Parameters that are DTensors (FSDP2, HSDP, tensor parallel): their gradients, and checks of their layouts."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpcore.parameters.shards import is_dtensor, laid_out, local, mesh_of, placements_of

Named = Iterable[tuple[str | int, Tensor]]


def check_shards(named: Named) -> None:
    """Raise ValueError if a DTensor has a layout that cannot be stepped, or shares memory with another parameter."""
    owners: dict[tuple[torch.device, int], tuple[str | int, Tensor]] = {}
    named = list(named)
    if not any(is_dtensor(param) for _, param in named):
        return
    for name, param in named:
        if is_dtensor(param) and any(placement.is_partial() for placement in placements_of(param)):
            what = f"parameter {name} is a DTensor with partial sums ({placements_of(param)})"
            raise ValueError(f"{what}: redistribute it to shards or replicas first")
        part = local(param)
        if part.numel() == 0 or part.is_meta:
            continue
        first, other = owners.setdefault((part.device, part.data_ptr()), (name, param))
        if other is not param:
            advice = "tie them as one parameter, by one fully_shard or parallelize_module of the module that holds both"
            raise ValueError(f"parameter {name} is a shard of the same memory as parameter {first}: {advice}")


def check_shard_of_state(index: Any, name: str, param: Tensor, value: Tensor) -> None:
    """Raise ValueError unless a loaded state is sharded as its parameter is."""
    if is_dtensor(param) != is_dtensor(value):
        what = "a whole tensor and the parameter a DTensor" if is_dtensor(param) else "a DTensor and the parameter not"
        problem = f"state_dict: {name} of parameter {index} is {what}"
        raise ValueError(f"{problem}: load it with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict")
    if is_dtensor(param) and (placements_of(value), mesh_of(value)) != (placements_of(param), mesh_of(param)):
        there = f"laid out as {placements_of(value)} on {mesh_of(value)}"
        here = f"the parameter as {placements_of(param)} on {mesh_of(param)}"
        raise ValueError(f"state_dict: {name} of parameter {index} is {there}, and {here}: redistribute it first")


def divided(tensor: Any, name: object = "") -> list[tuple[dist.ProcessGroup, int]]:
    """The ranks that have shards of a DTensor, and the dimension that they divide: the first division first.

    ValueError if a dimension of the mesh divides it in another way than ``torch.chunk`` divides what it gets.
    """
    mesh, placements = mesh_of(tensor), placements_of(tensor)
    dims = [dim for dim, one in enumerate(placements) if mesh.size(dim) > 1 and not one.is_replicate()]
    plain = [dim for dim in dims if type(placements[dim]).__name__ == "Shard"]
    late = [dim for dim in dims if dim not in plain]  # FSDP divides what tensor parallelism has divided
    inner = [[it for it in plain if it > dim and placements[it].dim == placements[dim].dim] for dim in late]
    after = [math.prod(map(mesh.size, found)) for found in inner]
    if len(late) > 1 or after != [placements[dim].split_factor for dim in late] or after == [1]:
        what = f"parameter {name} is laid out as {placements}, and Muon takes what torch.chunk divides"
        raise ValueError(f"{what}: put it in a group with rule='adamw'")
    return [(mesh.get_group(dim), placements[dim].dim) for dim in [*plain, *late]]


def first_of_shard(tensor: Any) -> int:
    """A number for the first element of the shard on this rank, a multiple of 4. Shards do not overlap.

    It is the place of the element in the whole tensor if that is sharded along its first dimension, into equal shards
    of a multiple of 4 elements, and not by FSDP and tensor parallelism together. Replicas have the same number. It is 0
    for a tensor that is no DTensor.
    """
    shard, largest = 0, list(tensor.shape)
    for dim, placement in enumerate(placements_of(tensor) if is_dtensor(tensor) else ()):
        if not placement.is_replicate():
            size, factor = mesh_of(tensor).size(dim), getattr(placement, "split_factor", 1)
            shard = shard * size + mesh_of(tensor).get_local_rank(dim)
            largest[placement.dim] = factor * -(-largest[placement.dim] // (size * factor))
    return shard * (-(-math.prod(largest) // 4) * 4)


def local_gradients(
    params: Sequence[Tensor], grads: Sequence[Any], named: Callable[[], Iterable[tuple[tuple[str | int, Tensor], Any]]]
) -> list[Tensor]:
    """The local shards of the gradients, laid out as their parameters. Partial sums are reduced, as torch does.

    ``named`` returns every parameter with its name, for the ValueError about a gradient on another mesh.
    """
    parts = []
    for param, grad in zip(params, grads, strict=True):
        if is_dtensor(param) and (not is_dtensor(grad) or grad.device_mesh != mesh_of(param)):
            name = next(name for (name, other), _ in named() if other is param)
            where = grad.device_mesh if is_dtensor(grad) else "no mesh"
            what = f"the gradient of parameter {name} is on {where}, and the parameter on {mesh_of(param)}"
            raise ValueError(f"{what}: compute it with the sharded model, or distribute it with distribute_tensor")
        parts.append(laid_out(param, grad))
    return parts
