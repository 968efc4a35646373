"""A description of the machine and the software versions, for records."""

from __future__ import annotations

import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from ddpcore.runtime import launch
from ddpcore.runtime.version import VERSION


def machine(device: str) -> dict[str, Any]:
    """Device, compiled kernels, versions, commit and date, as every record holds them."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "device_type": device,
        "cores": launch.num_cores(),
        "kernels": kernels(),
        "ddpcore": VERSION,
        "commit": _commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def kernels() -> list[str]:
    """The device types with compiled kernels; others use the reference implementations, which are much slower."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return [device for device in ("cpu", "cuda") if has_kernel("ddpcore::mix_", device.upper())]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout that contains this package; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")
