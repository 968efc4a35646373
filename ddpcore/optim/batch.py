"""Batches: the parameters that one kernel call steps, the arguments of the call, and sums over shards of DTensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddpcore import ops
from ddpcore.ops import reference
from ddpcore.ops.library import KERNEL_DTYPES
from ddpcore.optim.checks import Group
from ddpcore.parameters.shards import is_dtensor, mesh_of, placements_of

Item = TypeVar("Item")
STATE_SEED = 0x6D6F6D656E747573  # of the random numbers that round states


@dataclass
class Batch:
    """The parameters of one kernel call, and the buffers that the call needs."""

    members: list[int]  # positions of the parameters in the step's list
    groups: list[int]  # the optimizer's group of each group of the call
    sizes: list[int]  # the number of tensors of each group of the call
    steps: list[Tensor]  # the number of steps taken, one tensor per group of the call
    device: torch.device
    dtype: torch.dtype
    masters: bool  # whether the parameters have fp32 master weights
    firsts: list[int]  # index of each parameter's first element among the random numbers; empty: states are not rounded
    whole: bool  # whether the batch has all parameters of the step
    scratch: Tensor
    trust: Tensor
    norm: Tensor  # scratch for the norm of all gradients

    def of(self, items: list[Item]) -> list[Item]:
        """The batch's part of a list with one item per parameter of the step."""
        return items if self.whole else [items[index] for index in self.members]

    @property
    def kernels(self) -> Any:
        """The module with the operators: compiled ones, or reference implementations for dtypes without a kernel."""
        return ops if self.dtype in KERNEL_DTYPES else reference


class Shards:
    """The sums of the DTensors of a step, for one plan: all parameters of the step, and the batches that step them.

    The kernels step the local shards. A rule that needs the norm of a whole tensor has two passes: the first one writes
    the sums of squares of the local shards, :meth:`add_` adds the sums of other ranks, and the second one steps. All
    tensors of a step share one all-reduce for each dimension of the mesh.
    """

    def __init__(self, params: Sequence[Any], batches: Sequence[Batch]) -> None:
        self._rows: list[Tensor] = []  # of each device: two sums of each tensor
        # The all-reduces of add_: a group, and which rows it adds. There is none if this rank has all of each tensor.
        self.reductions: list[tuple[dist.ProcessGroup, Tensor, Tensor | None]] = []
        # By id of a batch: where its first pass writes sums of squares, [params, 2].
        self.squares: dict[int, Tensor] = {}
        for device in dict.fromkeys(batch.device for batch in batches):
            mine = [batch for batch in batches if batch.device == device]
            of_device = [params[position] for batch in mine for position in batch.members]
            rows = torch.zeros(len(of_device), 2, dtype=torch.float64, device=device)
            self._rows.append(rows)
            for group, numbers in _numbers_of(of_device).items():
                some = None if len(numbers) == len(rows) else torch.tensor(numbers, device=device)
                self.reductions.append((group, rows, some))
            parts = rows.split([len(batch.members) for batch in mine])
            self.squares.update({id(batch): part for batch, part in zip(mine, parts, strict=True)})

    def add_(self) -> None:
        """Add the sums of squares of the other ranks."""
        for group, rows, some in self.reductions:
            part = rows if some is None else rows.index_select(0, some)
            dist.all_reduce(part, group=group)
            if some is not None:
                rows.index_copy_(0, some, part)

    def norm_squared(self, batches: Sequence[Batch], grads: list[Tensor]) -> Tensor:
        """The squared norm of the gradients of all ranks together, from the local gradients of the step."""
        for batch in batches:
            self.squares[id(batch)][:, 0] = batch.kernels.segment_norms(batch.of(grads))
        self.add_()
        totals = [rows[:, :1].sum(dim=0) for rows in self._rows]
        return torch.stack([total.to(totals[0].device) for total in totals]).sum(dim=0)


def _numbers_of(params: Sequence[Any]) -> dict[dist.ProcessGroup, list[int]]:
    """The groups of ranks that have shards, each with the numbers of the tensors that they divide."""
    members: dict[dist.ProcessGroup, list[int]] = {}
    for number, param in enumerate(params):
        for dim, placement in enumerate(placements_of(param) if is_dtensor(param) else ()):
            if mesh_of(param).size(dim) > 1 and not placement.is_replicate():
                members.setdefault(mesh_of(param).get_group(dim), []).append(number)
    return members


@dataclass
class BatchPlan:
    """Batches that are reused by the next steps, and the facts from which they were made."""

    params: list[Tensor]  # the plan is valid while these are the same objects,
    steps: list[Tensor | None]  # these, the step counters of the parameters, too,
    known: tuple[list[Any], ...]  # and these are equal
    batches: list[Batch]
    shards: Shards | None = None  # if a parameter is a DTensor


def common_arguments(options: Sequence[Group], batch: Batch, scaling: tuple[Any, Any, Any, float]) -> dict[str, Any]:
    """The arguments that the steps of all optimizers have."""
    device = batch.device
    grad_scale, found_inf, norm_squared, max_norm = scaling
    lr = [group["lr"] for group in options]
    device_lr: list[Tensor] = []
    if isinstance(lr[0], Tensor):
        if all(tensor.device == device for tensor in lr):
            exact = torch.float64 if batch.dtype == torch.float64 else torch.float32
            device_lr, lr = [tensor.to(exact) for tensor in lr], [0.0] * len(lr)
        else:
            lr = [float(tensor) for tensor in lr]
    rounding = {"state_firsts": batch.firsts, "state_seed": STATE_SEED} if batch.firsts else {}
    return {
        "lr": lr,
        "device_lr": device_lr,
        "weight_decay": [group["weight_decay"] for group in options],
        "group_sizes": batch.sizes,
        "maximize": options[0]["maximize"],
        "grad_scale": on_device(grad_scale, device),
        "found_inf": on_device(found_inf, device),
        "norm_squared": on_device(norm_squared, device),
        "max_norm": max_norm,
        **rounding,
    }


def norm_squared_of(plan: BatchPlan, grads: list[Tensor]) -> Tensor:
    """The squared norm of all gradients of a step together, of all shards of a DTensor."""
    if plan.shards is not None:
        return plan.shards.norm_squared(plan.batches, grads)
    norms = []
    for batch in plan.batches:
        batch.kernels.total_norm_(batch.of(grads), batch.norm)
        norms.append(batch.norm[:1])
    return reduce(lambda total, norm: total + norm.to(total.device), norms)


def on_device(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """The tensor on the device. Only a copy to the CPU blocks, because CPU kernels read the value at once."""
    return None if tensor is None else tensor.to(device, non_blocking=device.type != "cpu")
