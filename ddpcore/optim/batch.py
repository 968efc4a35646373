"""The parameters of one kernel call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.ops import reference
from ddpcore.ops.dtypes import KERNEL_DTYPES

Group = dict[str, Any]
State = dict[str, Any]


@dataclass
class Batch:
    """Parameters of one kernel call, and what the call needs beside them."""

    members: list[int]  # positions among the parameters of the step
    groups: list[int]  # of the optimizer, one for each group of the call
    sizes: list[int]  # parameters in each
    steps: list[Tensor]  # steps taken, one for each
    device: torch.device
    dtype: torch.dtype
    masters: bool
    whole: bool = False  # the batch holds all parameters of the step
    scratch: Tensor | None = None
    trust: Tensor | None = None
    norm: Tensor | None = None  # scratch of the norm of all gradients

    @property
    def kernels(self) -> Any:
        """Where the operators are: compiled, or their twins for dtypes that no kernel takes."""
        return ops if self.dtype in KERNEL_DTYPES else reference

    def of_learner(self, learner: int, num_learners: int) -> Batch:
        """The part of one row of all stacks. The last learner counts the step."""
        assert self.trust is not None
        return replace(
            self,
            sizes=[size // num_learners for size in self.sizes],
            steps=self.steps if learner == num_learners - 1 else [step.clone() for step in self.steps],
            trust=self.trust[learner::num_learners].clone(),
        )


@dataclass
class BatchPlan:
    """What is kept from step to step, and by what it is known to hold still."""

    params: list[Tensor]
    known: tuple[list[Any], ...]  # what it takes for granted
    batches: list[Batch]


def common_arguments(options: Sequence[Group], batch: Batch, scaling: tuple[Any, Any, Any, float]) -> dict[str, Any]:
    """The arguments that the steps of all optimizers take."""
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
    }


def on_device(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """The tensor there; only the CPU, whose kernels read it at once, waits for it."""
    if tensor is None or tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")


def is_capturing(tensor: Tensor) -> bool:
    """Whether what is launched for the tensor goes into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
