"""Signals to a study while its ranks or several parallel runs train."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ddpcore.records.run import steps_of
from helpers import forked, ranks

pytestmark = pytest.mark.slow

SECONDS = 100.0  # for what takes two or three
START_SECONDS = 300.0  # to the first epoch: 15 on an idle machine, 100 on a busy one


class Study:
    """A process that trains, and its ranks: all write to one log, by which they are found."""

    def __init__(self, words: list[str], logs: Path) -> None:
        logs.mkdir()
        self.logs = logs
        self.process = forked.start(["-m", "ddpcore.experiments", *words], logs, ranks.environment(), Path.cwd())

    def wait_until(self, records: list[Path]) -> None:
        """Until each record holds an epoch."""
        deadline = time.monotonic() + START_SECONDS
        while not all(path.exists() and '"epoch"' in path.read_text() for path in records):
            if not self.process.is_alive():
                raise AssertionError(f"ended before its first epoch, with {self.end()}")
            assert time.monotonic() < deadline, "no epoch in time"
            time.sleep(0.05)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> tuple[int | None, str]:
        """Its exit code and standard error."""
        self.process.join(SECONDS)
        return self.process.exitcode, forked.output(self.logs)[1]

    def ranks(self) -> list[int]:
        """In the order in which they were started."""
        pids = [pid for pid in forked.writers(self.logs) if pid != self.process.pid]
        stats = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids}
        return sorted(pids, key=lambda pid: (int(stats[pid][19]), pid))


@contextmanager
def study(words: list[str], logs: Path) -> Iterator[Study]:
    """A study that has more steps than anyone waits for. None of its processes outlives the test."""
    words = ["run", *words, "--seeds", "1", "--set", "run.steps=1000000"]
    words += ["--set", "data.num_train=1000"]  # ten steps an epoch
    started = Study(words, logs)
    try:
        yield started
    finally:
        for pid in forked.writers(logs):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_save_before_they_end(number: signal.Signals, tiny: Path, tmp_path: Path) -> None:
    """Only the parent receives the signal, as from `kill`; it forwards the signal and waits."""
    out = tmp_path / "out"
    path = out / "runs" / "ssgd" / "seed-0"
    with study([str(tiny), "--out", str(out), "--rows", "ssgd", "--world-size", "2"], tmp_path / "logs") as started:
        started.wait_until([path / "record.jsonl"])
        started.signal(number)
        code, error = started.end()
    assert code == 130, error
    assert "and saved: go on with --resume" in error.splitlines()[-1]
    (step,) = steps_of(path / "checkpoints")
    assert f"stopped after step {step} of 1000000" in error, "not by SIGTERM, which the parent has passed on"
    (first, *_) = (json.loads(line) for line in (path / "record.jsonl").read_text().splitlines())
    assert first["ranks"] == 2


@pytest.fixture
def side_by_side(tiny: Path, tmp_path: Path) -> Iterator[tuple[Study, Path]]:
    """Rows a and b, each with more steps than anyone waits for, both in training."""
    out = tmp_path / "out"
    with study([str(tiny), "--out", str(out), "--rows", "a,b", "--jobs", "2"], tmp_path / "logs") as started:
        started.wait_until([out / "runs" / row / "seed-0" / "record.jsonl" for row in "ab"])
        yield started, out


def test_runs_side_by_side_are_all_saved(side_by_side: tuple[Study, Path]) -> None:
    started, out = side_by_side
    started.signal(signal.SIGTERM)
    code, error = started.end()
    assert code == 130, error
    assert "and saved: go on with --resume" in error.splitlines()[-1]
    for row in "ab":
        (step,) = steps_of(out / "runs" / row / "seed-0" / "checkpoints")
        assert 0 < step < 1000000
    assert not (out / "results.jsonl").exists()


def test_a_killed_process_of_several_ends_the_study_in_one_line(side_by_side: tuple[Study, Path]) -> None:
    started, _ = side_by_side
    workers = started.ranks()
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    code, error = started.end()
    assert code == 1
    assert error.splitlines()[-1] == "ddpcore experiments: rank 1 was ended by SIGKILL: go on with --resume"
