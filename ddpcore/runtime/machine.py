"""A description of the machine and the software versions, for records; its memory."""

import ctypes
import math
import platform
import re
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ddpcore.runtime import launch
from ddpcore.runtime.version import VERSION

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # constants of glibc's malloc.h
_NEVER, _TOP_PAD_BYTES = -1, 64 * 2**20


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
    with suppress(OSError):
        if found := re.search(r"^model name\s*: *(.*\S)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1]
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout that contains this package; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    describe = ["describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+changes"]
    try:
        found = subprocess.run(["git", "-C", str(root), *describe], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def free_memory(device: str) -> float:
    """Bytes that can be allocated; infinity if the system does not report them."""
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    with suppress(OSError):
        if found := re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE):
            return 1024.0 * int(found[1])
    return math.inf


def check_memory(what: str, needed: float, device: str, advice: str) -> None:
    """Raise ValueError unless this many bytes are free: where memory runs out, the system kills without a message."""
    free, need = free_memory(device), f"{what} need about {needed / 1e9:.1f} GB of memory"
    if needed > free:
        raise ValueError(f"{need} and {free / 1e9:.1f} GB are free: {advice}")


def keep_freed_memory() -> bool:
    """Keep the memory of freed tensors in this process, whose size then stays near its peak.

    glibc unmaps each freed tensor of more than 32 MiB, and the system zeroes the pages of the next one. With batches of
    some thousand images this is half of the time of a training step on a CPU. Returns whether the C library is glibc;
    with another one nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _NEVER, _M_TOP_PAD: _TOP_PAD_BYTES}
    return all(mallopt(name, value) == 1 for name, value in settings.items())
