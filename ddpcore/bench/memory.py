"""The most memory that this process grew by between two moments."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch

from ddpcore.flat import MiB

_PROCESS = Path("/proc/self")


class PeakMemory:
    """From its making to :meth:`grown_mb`: torch's allocator on a GPU, the resident set on the CPU.

    The resident set counts shared memory in every rank that touches it.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        gc.collect()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._before: float | None = torch.cuda.memory_allocated()
        else:
            _give_back()
            self._before = _resident("VmRSS") if _reset() else None

    def grown_mb(self) -> float | None:
        """MiB, at least 0; None where the system does not say."""
        peak = torch.cuda.max_memory_allocated() if self._device == "cuda" else _resident("VmHWM")
        return None if self._before is None or peak is None else max(0.0, peak - self._before) / MiB


def _give_back() -> None:
    """What was freed goes back to the system, or the next to grow would seem to need less."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _reset() -> bool:
    try:
        (_PROCESS / "clear_refs").write_text("5")  # the peak counts anew: proc(5)
    except OSError:
        return False
    return True


def _resident(key: str) -> float | None:
    try:
        for line in (_PROCESS / "status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return 1024.0 * int(line.split()[1])
    except OSError:
        pass
    return None
