"""What a run ran on: the block that stands above every table and in every record."""

from __future__ import annotations

import math
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import ddpcore
from ddpcore import launch
from ddpcore.bench.config import Plan


def machine(device: str) -> dict[str, Any]:
    """The part that every record has: device, versions, commit, date."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "device_type": device,
        "cores": launch.num_cores(),
        "ddpcore": ddpcore.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


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


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout that this package runs from; None for an installed package."""
    root = Path(ddpcore.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")
