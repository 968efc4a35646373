"""GpuMeter with a fake GPU: how it adds up measurements."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpcore import Single
from ddpcore.bench import contender, gpu


class Allocator:
    """A fake of torch's CUDA allocator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 1000  # of others
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self._reset)

    def take(self, num_bytes: int) -> None:
        """Allocate; a negative number frees."""
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)

    def _reset(self) -> None:
        self.peak = self.allocated


def test_energy_power_and_utilisation_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    millijoules = iter([1000, 4000, 9000, 10000])  # start, stop, start, stop
    seconds = iter([0.0, 2.0, 10.0, 12.0])
    utilization = iter([80, 40])
    seen: list[str] = []

    def handle(uuid: str) -> str:
        seen.append(uuid)
        return "gpu"

    played = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetTotalEnergyConsumption=lambda device: next(millijoules),
        nvmlDeviceGetUtilizationRates=lambda device: SimpleNamespace(gpu=next(utilization)),
    )
    monkeypatch.setattr(gpu, "pynvml", played)
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12ab"))
    Allocator(monkeypatch)
    meter = gpu.GpuMeter()
    for _ in range(2):
        with meter.turn("dpsgd"):
            pass
    assert seen == ["GPU-12ab"]
    assert meter.reading("dpsgd") == {"joules": 4.0, "watts": 1.0, "utilization_pct": 60.0, "memory_bytes": 0}
    assert meter.reading("ddp") is None


def test_memory_is_what_a_name_itself_holds_and_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory counts from the construction on, which is not timed; memory of other names never counts."""
    monkeypatch.setattr(gpu, "pynvml", None)
    allocator, meter = Allocator(monkeypatch), gpu.GpuMeter()
    for name, weights, gradients in (("small", 10, 5), ("large", 300, 200)):
        with meter.turn(name, timed=False):
            allocator.take(weights)
        with meter.turn(name, timed=False):
            allocator.take(gradients)  # which stay allocated
    for name, activations in (("large", 4000), ("small", 70), ("small", 60)):
        with meter.turn(name):
            allocator.take(activations)
            allocator.take(-activations)
    nothing = {"joules": None, "watts": None, "utilization_pct": None}
    assert meter.reading("small") == nothing | {"memory_bytes": 10 + 5 + 70}
    assert meter.reading("large") == nothing | {"memory_bytes": 300 + 200 + 4000}


def test_ranks_that_wait_are_not_metered() -> None:
    """`single` trains only on rank 0."""
    seen: list[Any] = []

    @contextmanager
    def turn(*words: Any) -> Iterator[None]:
        seen.append("start")
        yield
        seen.append(words)

    meter: Any = SimpleNamespace(turn=turn)
    waiting = contender.Contender("single", None, Single())
    contender.run_block(waiting, 3, True, meter)
    assert not seen and len(waiting.block_seconds) == 1
    trainer = SimpleNamespace(step=lambda: torch.zeros(1), dataset=SimpleNamespace(train=SimpleNamespace()))
    trainer.dataset.train.labels = torch.zeros(1)
    trainer.handle, trainer.num_steps = SimpleNamespace(comm=None, deals=[]), 0
    trainer.batches = SimpleNamespace(num_learners=1, batch_size=8)
    working = contender.Contender("single", trainer, Single())
    for timed in (False, True):
        contender.run_block(working, 3, timed, meter)
    assert seen == ["start", ("single", False), "start", ("single", True)]


def test_the_management_library_can_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    spec = importlib.util.spec_from_file_location("gpu_without_library", gpu.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert module.pynvml is None
