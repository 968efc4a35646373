"""What a bench ran on: the block that stands above every table and in every record."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from ddpcore import launch
from ddpcore.bench.config import Plan
from ddpcore.machine import machine


def environment(plan: Plan) -> dict[str, Any]:
    """That of a run with learners: how they are connected and why, too."""
    processes = 1 if plan.choice.backend == "virtual" else plan.world_size
    return {
        **machine(plan.device),
        "threads_per_rank": launch.threads_per_rank(processes),
        "oversubscribed": processes > launch.num_cores() if plan.device == "cpu" else False,
        "backend": plan.choice.backend,
        "backend_reason": plan.choice.reason,
        "transport": None if plan.transport is None else plan.transport.name,
        "transport_reason": None if plan.transport is None else plan.transport.reason,
        "notes": list(plan.notes),
    }


def free_memory(device: str) -> float:
    """Bytes that can be allocated; infinity where the system does not say."""
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    except OSError:
        pass
    return math.inf
