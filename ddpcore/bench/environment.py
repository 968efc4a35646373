"""The environment of a bench, which every table and every JSON file shows, and checks of free memory."""

from __future__ import annotations

import math
from typing import Any

import torch

from ddpcore.bench.config import ResolvedConfig
from ddpcore.bench.memory import status_bytes
from ddpcore.models import MODELS
from ddpcore.runtime import launch
from ddpcore.runtime.machine import machine

COPIES = 5  # of the parameters in each contender: weights, gradients, two moments, buckets or staging buffers


def environment(resolved: ResolvedConfig) -> dict[str, Any]:
    """The machine, the connection of the learners, and the reasons for it."""
    processes = 1 if resolved.is_virtual else resolved.world_size
    return {
        **machine(resolved.device),
        "threads_per_rank": torch.get_num_threads(),
        "oversubscribed": processes > launch.num_cores() if resolved.device == "cpu" else False,
        "backend": resolved.choice.backend,
        "backend_reason": resolved.choice.reason,
        "transport": resolved.transport_name,
        "transport_reason": None if resolved.transport is None else resolved.transport.reason,
        "notes": list(resolved.notes),
    }


def model_bytes(resolved: ResolvedConfig) -> int:
    """Bytes of the parameters of the model."""
    model = MODELS.build(resolved.training.model.name, **resolved.training.model.options)
    return sum(4 * parameter.numel() for parameter in model.parameters())


def check_models_memory(num_models: int, resolved: ResolvedConfig, advice: str) -> None:
    """Check that this number of contenders, each with its own model, fits into memory.

    Raises:
        ValueError: see :func:`check_memory`.
    """
    ranks = resolved.world_size if resolved.device == "cpu" else 1
    needed = ranks * COPIES * model_bytes(resolved) * num_models
    check_memory(f"{num_models} copies of {resolved.training.model.name}", needed, resolved.device, advice)


def free_memory(device: str) -> float:
    """Bytes that can be allocated; infinity if the system does not report them."""
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    free = status_bytes("/proc/meminfo", "MemAvailable")
    return math.inf if free is None else free


def check_memory(what: str, needed: float, device: str, advice: str) -> None:
    """Check that this many bytes are free, because the system kills processes without a message if memory runs out.

    Raises:
        ValueError: too few are free; the message begins with ``what`` and ends with ``advice``.
    """
    free, need = free_memory(device), f"{what} need about {needed / 1e9:.1f} GB of memory"
    if needed > free:
        raise ValueError(f"{need} and {free / 1e9:.1f} GB are free: {advice}")
