"""Energy, power, utilisation and memory of the current GPU, by NVIDIA's management library."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pynvml
import torch


@dataclass
class _Total:
    joules: float = 0.0
    seconds: float = 0.0
    utilization_pct: float = 0.0
    memory_bytes: int = 0
    blocks: int = 0


class GpuMeter:
    """Adds up, by name, what the GPU of this rank used between ``start`` and ``stop``."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        # By UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices and not NVML's.
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        self._gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        self._totals: dict[str, _Total] = {}
        self._began = (0.0, 0.0)

    def start(self) -> None:
        """A block begins."""
        self._began = (self._joules(), time.perf_counter())

    def stop(self, name: str) -> None:
        """The block ends: what it used counts for ``name``."""
        joules, now = self._joules(), time.perf_counter()
        total = self._totals.setdefault(name, _Total())
        total.joules += joules - self._began[0]
        total.seconds += now - self._began[1]
        total.utilization_pct += pynvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu
        total.memory_bytes = max(total.memory_bytes, pynvml.nvmlDeviceGetMemoryInfo(self._gpu).used)
        total.blocks += 1

    def reading(self, name: str) -> dict[str, Any] | None:
        """Joules, mean watts, mean utilisation (percent) and peak memory (bytes) of a name; None if it never ran."""
        total = self._totals.get(name)
        if total is None:
            return None
        return {
            "joules": total.joules,
            "watts": total.joules / total.seconds if total.seconds > 0 else 0.0,
            "utilization_pct": total.utilization_pct / total.blocks,
            "memory_bytes": total.memory_bytes,
        }

    def _joules(self) -> float:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) / 1000
