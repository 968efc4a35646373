"""GpuMeter against a management library that is played: what it adds up, not what a GPU says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ddpcore.bench import gpu


def test_energy_power_utilisation_and_memory_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    millijoules = iter([1000, 4000, 9000, 10000])  # start, stop, start, stop
    seconds = iter([0.0, 2.0, 10.0, 12.0])
    utilization, memory = iter([80, 40]), iter([500, 300])
    seen: list[str] = []

    def handle(uuid: str) -> str:
        seen.append(uuid)
        return "gpu"

    played = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetTotalEnergyConsumption=lambda device: next(millijoules),
        nvmlDeviceGetUtilizationRates=lambda device: SimpleNamespace(gpu=next(utilization)),
        nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(used=next(memory)),
    )
    monkeypatch.setattr(gpu, "pynvml", played)
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12ab"))
    meter = gpu.GpuMeter()
    for _ in range(2):
        meter.start()
        meter.stop("dpsgd")
    assert seen == ["GPU-12ab"]
    assert meter.reading("dpsgd") == {"joules": 4.0, "watts": 1.0, "utilization_pct": 60.0, "memory_bytes": 500}
    assert meter.reading("ddp") is None
