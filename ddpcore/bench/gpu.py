"""Energy, power, utilisation and memory of the current GPU, for contenders that take turns on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

try:
    import pynvml
except ImportError:  # nvidia-ml-py: without it there are no energy, power and utilisation
    pynvml = None


@dataclass
class _Total:
    joules: float = 0.0
    seconds: float = 0.0
    utilization_pct: float = 0.0
    held_bytes: int = 0
    peak_bytes: int = 0
    blocks: int = 0


class GpuMeter:
    """Measures the GPU of this rank during turns and adds the measurements up by name.

    Memory is that of torch's allocator: what a name has allocated in its turns and not freed, plus the largest amount
    that one of its turns allocated in addition. Memory of other names does not count.
    """

    def __init__(self) -> None:
        self._gpu = None
        if pynvml is not None:
            pynvml.nvmlInit()
            # By UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices but not NVML's.
            uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
            self._gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        self._totals: dict[str, _Total] = {}

    @contextmanager
    def turn(self, name: str, timed: bool = True) -> Iterator[None]:
        """A turn of ``name``. If it is not ``timed``, only its memory counts."""
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        joules, start = self._joules(), time.perf_counter()
        yield
        joules, seconds = self._joules() - joules, time.perf_counter() - start
        total = self._totals.setdefault(name, _Total())
        total.peak_bytes = max(total.peak_bytes, total.held_bytes + torch.cuda.max_memory_allocated() - allocated)
        total.held_bytes += torch.cuda.memory_allocated() - allocated
        if not timed:
            return
        total.joules += joules
        total.seconds += seconds
        if self._gpu is not None:
            total.utilization_pct += pynvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu
        total.blocks += 1

    def reading(self, name: str) -> dict[str, Any] | None:
        """Joules, mean watts, mean utilisation (percent) and peak memory (bytes) of a name; None if it never ran.

        Without NVIDIA's management library all but the memory are None.
        """
        total = self._totals.get(name)
        if total is None:
            return None
        known = self._gpu is not None and total.blocks > 0
        return {
            "joules": total.joules if known else None,
            "watts": total.joules / total.seconds if known and total.seconds > 0 else None,
            "utilization_pct": total.utilization_pct / total.blocks if known else None,
            "memory_bytes": total.peak_bytes,
        }

    def _joules(self) -> float:
        return 0.0 if self._gpu is None else pynvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) / 1000
