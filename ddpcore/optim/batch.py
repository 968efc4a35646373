"""The parameters of one kernel call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.ops import reference

Group = dict[str, Any]
State = dict[str, Any]

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


def group_lists(options: Sequence[Group], batch: Batch) -> dict[str, Any]:
    """The arguments that have an entry a group."""
    lr = [group["lr"] for group in options]
    device_lr: list[Tensor] = []
    if isinstance(lr[0], Tensor):
        if all(tensor.device == batch.device for tensor in lr):
            exact = torch.float64 if batch.dtype == torch.float64 else torch.float32
            device_lr, lr = [tensor.to(exact) for tensor in lr], [0.0] * len(lr)
        else:
            lr = [float(tensor) for tensor in lr]
    return {
        "lr": lr,
        "device_lr": device_lr,
        "weight_decay": [group["weight_decay"] for group in options],
        "group_sizes": batch.sizes,
    }


def on_device(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """The tensor there, without waiting."""
    return tensor if tensor is None or tensor.device == device else tensor.to(device, non_blocking=True)
