"""A study that is told to stop while its ranks train."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddpcore.engine.checkpoint import Checkpoints

SECONDS = 100.0  # for what takes two or three


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_save_before_they_end(number: signal.Signals, tiny: Path, tmp_path: Path) -> None:
    """Told to the parent alone, as by `kill`; it passes the signal on and waits."""
    out = tmp_path / "out"
    words = [sys.executable, "-m", "ddpcore.experiments", "run", str(tiny), "--out", str(out), "--rows", "ssgd"]
    words += ["--seeds", "1", "--world-size", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen([*words, "--set", "steps=1000000"], env=env, text=True, stderr=subprocess.PIPE)
    path = out / "runs" / "ssgd" / "seed-0"
    deadline = time.monotonic() + SECONDS
    while not (path / "record.jsonl").exists() or '"epoch"' not in (path / "record.jsonl").read_text():
        assert started.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    started.send_signal(number)
    _, error = started.communicate(timeout=SECONDS)
    assert started.returncode == 130, error
    assert "and saved: go on with --resume" in error.splitlines()[-1]
    (step,) = Checkpoints(folder=path / "checkpoints", config={}).steps()
    assert f"after step {step} of 1000000" in error
    (first, *_) = (json.loads(line) for line in (path / "record.jsonl").read_text().splitlines())
    assert first["ranks"] == 2
