"""How much a process grew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddpcore.bench import memory
from ddpcore.bench.memory import PeakMemory


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not say")
def test_the_peak_counts_and_what_was_before_does_not() -> None:
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


def test_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_PROCESS", tmp_path / "nowhere")
    assert PeakMemory("cpu").grown_mb() is None
