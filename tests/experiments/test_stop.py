"""Signals to a study while its ranks or several parallel runs train."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ddpcore.records.run import steps_of

pytestmark = pytest.mark.slow

SECONDS = 100.0  # for what takes two or three
START_SECONDS = 300.0  # to the first epoch: 15 on an idle machine, 100 on a busy one


def wait_until(started: subprocess.Popen[str], records: list[Path]) -> None:
    """Until each record holds an epoch."""
    deadline = time.monotonic() + START_SECONDS
    while not all(path.exists() and '"epoch"' in path.read_text() for path in records):
        if started.poll() is not None:
            raise AssertionError(f"ended before its first epoch, with {started.returncode}: {started.communicate()[1]}")
        assert time.monotonic() < deadline, "no epoch in time"
        time.sleep(0.05)


@contextmanager
def study(words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A study that has more steps than anyone waits for. None of its processes outlives the test."""
    words = [sys.executable, "-m", "ddpcore.experiments", "run", *words, "--seeds", "1", "--set", "run.steps=1000000"]
    words += ["--set", "data.num_train=1000"]  # ten steps an epoch
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(words, env=env, text=True, stderr=subprocess.PIPE, start_new_session=True)
    try:
        yield started
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_save_before_they_end(number: signal.Signals, tiny: Path, tmp_path: Path) -> None:
    """Only the parent receives the signal, as from `kill`; it forwards the signal and waits."""
    out = tmp_path / "out"
    path = out / "runs" / "ssgd" / "seed-0"
    with study([str(tiny), "--out", str(out), "--rows", "ssgd", "--world-size", "2"]) as started:
        wait_until(started, [path / "record.jsonl"])
        started.send_signal(number)
        _, error = started.communicate(timeout=SECONDS)
    assert started.returncode == 130, error
    assert "and saved: go on with --resume" in error.splitlines()[-1]
    (step,) = steps_of(path / "checkpoints")
    assert f"after step {step} of 1000000" in error
    (first, *_) = (json.loads(line) for line in (path / "record.jsonl").read_text().splitlines())
    assert first["ranks"] == 2


@pytest.fixture
def side_by_side(tiny: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Rows a and b, each with more steps than anyone waits for, both in training."""
    out = tmp_path / "out"
    with study([str(tiny), "--out", str(out), "--rows", "a,b", "--jobs", "2"]) as started:
        wait_until(started, [out / "runs" / row / "seed-0" / "record.jsonl" for row in "ab"])
        yield started, out


def test_runs_side_by_side_are_all_saved(side_by_side: tuple[subprocess.Popen[str], Path]) -> None:
    started, out = side_by_side
    started.terminate()
    _, error = started.communicate(timeout=SECONDS)
    assert started.returncode == 130, error
    assert "and saved: go on with --resume" in error.splitlines()[-1]
    for row in "ab":
        (step,) = steps_of(out / "runs" / row / "seed-0" / "checkpoints")
        assert 0 < step < 1000000
    assert not (out / "results.jsonl").exists()


def test_a_killed_process_of_several_ends_the_study_in_one_line(
    side_by_side: tuple[subprocess.Popen[str], Path],
) -> None:
    started, _ = side_by_side
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    workers = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(workers) == 2
    os.kill(int(workers[1]), signal.SIGKILL)
    _, error = started.communicate(timeout=SECONDS)
    assert started.returncode == 1
    assert error.splitlines()[-1] == "ddpcore experiments: rank 1 was ended by SIGKILL: go on with --resume"
