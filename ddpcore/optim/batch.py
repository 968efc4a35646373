"""Batches: the parameters that one kernel call steps, and the arguments of the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.ops import reference
from ddpcore.ops.dtypes import KERNEL_DTYPES

Group = dict[str, Any]
State = dict[str, Any]
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


@dataclass
class BatchPlan:
    """Batches that are reused by the next steps, and the facts from which they were made."""

    params: list[Tensor]  # the plan is valid while these are the same objects,
    steps: list[Tensor | None]  # these, the step counters of the parameters, too,
    known: tuple[list[Any], ...]  # and these are equal
    batches: list[Batch]
    shards: Any = None  # a Shards, if a parameter is a DTensor


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
        total: Tensor = plan.shards.norm_squared(plan.batches, grads)
        return total
    norms = []
    for batch in plan.batches:
        batch.kernels.total_norm_(batch.of(grads), batch.norm)
        norms.append(batch.norm[:1])
    return reduce(lambda total, norm: total + norm.to(total.device), norms)


def on_device(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """The tensor on the device. Only a copy to the CPU blocks, because CPU kernels read the value at once."""
    if tensor is None or tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")


def is_capturing(tensor: Tensor) -> bool:
    """Whether a kernel launched now for the tensor would be captured in a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
