"""Parameters that are DTensors (FSDP2, HSDP, tensor parallel): local shards, and sums over all shards of a tensor.

The kernels step the local shards. A rule that needs the norm of a whole tensor has two passes: the first one writes the
sums of squares of the local shards, :meth:`Shards.add_` adds those of the other ranks, and the second one steps. All
tensors of a step share one all-reduce for each dimension of the mesh. A dimension over which a tensor is replicated
adds nothing to its sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpcore.optim.batch import Batch

Named = Iterable[tuple[str | int, Tensor]]


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor. The class itself is not imported, because that takes long."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Any) -> Tensor:
    """The part of a DTensor on this rank; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def check_shards(named: Named) -> None:
    """Raise ValueError if a DTensor has a layout that cannot be stepped, or shares memory with another parameter."""
    owners: dict[tuple[torch.device, int], tuple[str | int, Tensor]] = {}
    named = list(named)
    if not any(is_dtensor(param) for _, param in named):
        return
    for name, param in named:
        if is_dtensor(param) and any(placement.is_partial() for placement in placements_of(param)):
            raise ValueError(
                f"parameter {name} is a DTensor with partial sums ({placements_of(param)}): redistribute it to shards "
                "or replicas first"
            )
        part = local(param)
        if part.numel() == 0 or part.is_meta:
            continue
        first, other = owners.setdefault((part.device, part.data_ptr()), (name, param))
        if other is not param:
            raise ValueError(
                f"parameter {name} is a shard of the same memory as parameter {first}: tie them as one parameter, by "
                "one fully_shard or parallelize_module of the module that holds both"
            )


def check_shard_of_state(index: Any, name: str, param: Tensor, value: Tensor) -> None:
    """Raise ValueError unless a loaded state is sharded as its parameter is."""
    if is_dtensor(param) != is_dtensor(value):
        what = "a whole tensor and the parameter a DTensor" if is_dtensor(param) else "a DTensor and the parameter not"
        raise ValueError(
            f"state_dict: {name} of parameter {index} is {what}: load it with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
        )
    if is_dtensor(param) and (placements_of(value), mesh_of(value)) != (placements_of(param), mesh_of(param)):
        raise ValueError(
            f"state_dict: {name} of parameter {index} is laid out as {placements_of(value)} on {mesh_of(value)}, and "
            f"the parameter as {placements_of(param)} on {mesh_of(param)}: redistribute it first"
        )


def placements_of(tensor: Any) -> Any:
    """The placements of a DTensor, one for each dimension of its mesh."""
    return tensor.placements


def mesh_of(tensor: Any) -> Any:
    """The device mesh of a DTensor."""
    return tensor.device_mesh


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

    Args:
        params: those of the step.
        grads: one for each.
        named: returns every parameter with its name, for errors.

    Raises:
        ValueError: a gradient is not a DTensor on the mesh of its parameter.
    """
    parts = []
    for param, grad in zip(params, grads, strict=True):
        if not is_dtensor(param):
            parts.append(grad)
            continue
        if not is_dtensor(grad) or grad.device_mesh != mesh_of(param):
            name = next(name for (name, other), _ in named() if other is param)
            where = grad.device_mesh if is_dtensor(grad) else "no mesh"
            raise ValueError(
                f"the gradient of parameter {name} is on {where}, and the parameter on {mesh_of(param)}: "
                "compute it with the sharded model, or distribute it with distribute_tensor"
            )
        if grad.placements != placements_of(param):
            grad = grad.redistribute(placements=placements_of(param))
        part = grad._local_tensor
        wait = getattr(part, "wait", None)  # a collective that has not ended
        parts.append(part if wait is None else wait())
    return parts


class Shards:
    """The sums of the DTensors of a step, for one plan.

    Args:
        params: all parameters of the step.
        batches: how kernels step them.
    """

    def __init__(self, params: Sequence[Any], batches: Sequence[Batch]) -> None:
        self._sums: list[_Sums] = []
        self._squares: dict[int, Tensor] = {}
        for device in dict.fromkeys(batch.device for batch in batches):
            mine = [batch for batch in batches if batch.device == device]
            sums = _Sums([params[position] for batch in mine for position in batch.members], device)
            self._sums.append(sums)
            parts = sums.rows.split([len(batch.members) for batch in mine])
            self._squares.update({id(batch): part for batch, part in zip(mine, parts, strict=True)})

    @property
    def num_reductions(self) -> int:
        """All-reduces of :meth:`add_`: none if this rank has all of each tensor."""
        return sum(len(sums.groups) for sums in self._sums)

    def squares(self, batch: Batch) -> Tensor:
        """``[params, 2]``: where the first pass of a batch writes its sums of squares."""
        return self._squares[id(batch)]

    def add_(self) -> None:
        """Add the sums of squares of the other ranks."""
        for sums in self._sums:
            sums.add_()

    def norm_squared(self, batches: Sequence[Batch], grads: list[Tensor]) -> Tensor:
        """The squared norm of the gradients of all ranks together.

        Args:
            batches: of the plan.
            grads: local gradients of all parameters of the step.
        """
        for batch in batches:
            self._squares[id(batch)][:, 0] = batch.kernels.segment_norms(batch.of(grads))
        self.add_()
        totals = [sums.rows[:, :1].sum(dim=0) for sums in self._sums]
        return torch.stack([total.to(totals[0].device) for total in totals]).sum(dim=0)


class _Sums:
    """Rows of two sums, one row for each tensor, and the groups of ranks that have shards of the tensor."""

    def __init__(self, params: Sequence[Any], device: torch.device) -> None:
        self.rows = torch.zeros(len(params), 2, dtype=torch.float64, device=device)
        members: dict[dist.ProcessGroup, list[int]] = {}
        for row, param in enumerate(params):
            for dim, placement in enumerate(placements_of(param) if is_dtensor(param) else ()):
                if mesh_of(param).size(dim) > 1 and not placement.is_replicate():
                    members.setdefault(mesh_of(param).get_group(dim), []).append(row)
        self.groups = [
            (group, None if len(rows) == len(params) else torch.tensor(rows, device=device))
            for group, rows in members.items()
        ]

    def add_(self) -> None:
        for group, rows in self.groups:
            part = self.rows if rows is None else self.rows.index_select(0, rows)
            dist.all_reduce(part, group=group)
            if rows is not None:
                self.rows.index_copy_(0, rows, part)
