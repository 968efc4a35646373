"""The growth of a process's memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from ddpcore.bench import command
from ddpcore.bench.command import PeakMemory
from ddpcore.comm.shared.memory import HostMemory

KNOWN = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not report memory")


@KNOWN
def test_only_growth_after_the_start_counts() -> None:
    before = torch.ones(32 * 2**18)
    peak = PeakMemory("cpu")
    passing = torch.ones(64 * 2**18)
    del passing
    grown = peak.grown_mb()
    assert grown is not None
    assert 60 <= grown < 90
    again = PeakMemory("cpu").grown_mb()
    assert again is not None
    assert again < 30, "the peak counts anew"
    assert before[0] == 1


@KNOWN
@pytest.mark.parametrize(("num_sharing", "least", "most"), [(1, 110, 145), (4, 30, 65)])
def test_shared_memory_counts_once(num_sharing: int, least: float, most: float) -> None:
    """64 MiB that stay and 64 MiB that are freed; with four ranks, a quarter of both counts."""
    peak = PeakMemory("cpu", num_sharing)
    kept, _ = HostMemory().allocate(64 * 2**20)
    passing, _ = HostMemory().allocate(64 * 2**20)
    for _ in range(2000):  # until the sampler has run
        if peak._shared._most - peak._shared._before >= 128 * 2**20:
            break
        time.sleep(0.005)
    del passing
    grown = peak.grown_mb()
    assert grown is not None
    assert least <= grown < most
    assert not kept.any()


def test_a_system_that_does_not_report_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "_PROCESS", str(tmp_path / "nowhere"))
    assert PeakMemory("cpu").grown_mb() is None
