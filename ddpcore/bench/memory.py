"""The most memory that this process grew by between two moments."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path

import torch

from ddpcore.flat import MiB

_PROCESS = Path("/proc/self")


class PeakMemory:
    """From its making to :meth:`grown_mb`: torch's allocator on a GPU, the resident set on the CPU.

    The resident set counts memory that ranks share in each of them. Each is given its share instead, as proportional
    set sizes do, of the most that it had mapped; the system keeps the peak of the whole only, so that is watched.

    Args:
        device: ``cpu`` or ``cuda``.
        num_sharing: processes that map the same shared memory, all of them all of it.
    """

    def __init__(self, device: str, num_sharing: int = 1) -> None:
        self._device = device
        self._others = 1 - 1 / num_sharing
        gc.collect()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._before: float | None = torch.cuda.memory_allocated()
        else:
            _give_back()
            self._before = _resident("VmRSS") if _reset() else None
            self._shared = _Watch("RssShmem")

    def grown_mb(self) -> float | None:
        """MiB, at least 0; None where the system does not say."""
        peak = torch.cuda.max_memory_allocated() if self._device == "cuda" else _resident("VmHWM")
        of_others = 0.0 if self._device == "cuda" else self._others * self._shared.most_grown()
        return None if self._before is None or peak is None else max(0.0, peak - self._before - of_others) / MiB


class _Watch:
    """Looks at a line of the process's status every few milliseconds, for segments of memory live longer."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._before = self._most = _resident(key) or 0.0
        self._is_over = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def most_grown(self) -> float:
        """Bytes, up to now; what comes later is not looked at."""
        self._is_over.set()
        return max(self._most, _resident(self._key) or 0.0) - self._before

    def _look(self) -> None:
        while not self._is_over.wait(0.002):
            self._most = max(self._most, _resident(self._key) or 0.0)


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
