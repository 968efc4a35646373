"""The largest growth of this process's memory between two points in time."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path

import torch

from ddpcore.parameters.flat import MiB

_PROCESS = "/proc/self"


class PeakMemory:
    """The growth of memory since the constructor: torch's allocated memory on a GPU, the resident set on the CPU.

    The resident set of each rank contains all memory that the ranks share. :meth:`grown_mb` counts only this rank's
    part of the largest amount of shared memory that was mapped, as a proportional set size does. The system records the
    peak of the whole resident set. It does not record the peak of the shared part, so a thread samples the shared part.

    Args:
        device: ``cpu`` or ``cuda``.
        num_sharing: number of processes that map the same shared memory.
    """

    def __init__(self, device: str, num_sharing: int = 1) -> None:
        self._device = device
        self._others = 1 - 1 / num_sharing
        gc.collect()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._before: float | None = torch.cuda.memory_allocated()
        else:
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                # Return freed memory to the system: if the process used it again, its resident set would not grow.
                trim(0)
            self._before = _resident("VmRSS") if _reset_peak() else None
            self._shared = _Sampler("RssShmem")

    def grown_mb(self) -> float | None:
        """The growth in MiB, at least 0; None if the system does not report the resident set."""
        peak = torch.cuda.max_memory_allocated() if self._device == "cuda" else _resident("VmHWM")
        of_others = 0.0 if self._device == "cuda" else self._others * self._shared.stop()
        return None if self._before is None or peak is None else max(0.0, peak - self._before - of_others) / MiB


class _Sampler:
    """Samples one line of the process's status every 2 ms. Shared segments exist for longer than 2 ms."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._before = self._most = _resident(key) or 0.0
        self._stopped = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def stop(self) -> float:
        """Stop the thread, and return the largest growth in bytes."""
        self._stopped.set()
        return max(self._most, _resident(self._key) or 0.0) - self._before

    def _sample(self) -> None:
        while not self._stopped.wait(0.002):
            self._most = max(self._most, _resident(self._key) or 0.0)


def _reset_peak() -> bool:
    try:
        Path(_PROCESS, "clear_refs").write_text("5")  # resets VmHWM: proc(5)
    except OSError:
        return False
    return True


def _resident(key: str) -> float | None:
    return status_bytes(f"{_PROCESS}/status", key)


def status_bytes(file: str, key: str) -> float | None:
    """The bytes in the line ``KEY: NUMBER kB`` of a system file; None without such a line or a readable file."""
    try:
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{key}:"):
                return 1024.0 * int(line.split()[1])
    except OSError:
        pass
    return None
