"""``train`` with ``on_failure="shrink"``: the run goes on when a rank is killed, also the one that writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddpcore.training import TrainConfig
from ddpcore.training.record import RunRecord, rows
from helpers import ranks

TIMEOUT = 120.0
FIELDS = ("model=mlp", "dataset=digits", "strategy=dpsgd", "epochs=20", "batch_size=60", "on_failure=shrink")


def children(pid: int) -> list[int]:
    """The ranks of a launcher, by rank."""
    pids = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [one for one in pids if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]


def test_a_run_goes_on_without_the_rank_that_wrote_it(tmp_path: Path) -> None:
    """Rank 0 of three is killed after some epochs. Another one writes on, and the model and the end are there."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "ddpcore.training", "--world-size", "3", "--out", str(out), *FIELDS]
    launcher = subprocess.Popen(command, env=ranks.environment(), stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + TIMEOUT
        record = out / "record.jsonl"
        while not record.exists() or sum(row["kind"] == "epoch" for row in rows(record)) < 2:
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(children(launcher.pid)[0], signal.SIGKILL)
        _, errors = launcher.communicate(timeout=TIMEOUT)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, errors
    assert "ddpcore: rank 0 was ended by SIGKILL: the others go on" in errors
    assert "ddpcore: learner 0 is gone, and what it held is lost: 2 learners go on" in errors
    run = RunRecord.read(out)
    assert run.final["step"] == run.header["total_steps"]
    assert run.final["accuracy"] > 0.8
    (change,) = [row for row in rows(record) if row["kind"] == "members"]
    assert change["lost"] == [0] and change["members"] == [1, 2]
    steps = [row["step"] for row in run.epochs]
    assert steps == sorted(set(steps)) and len(steps) == 20, "no epoch is missing or written twice"
    assert (out / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "ddp"}, "ddp ends when a rank dies: take 'raise', or another strategy"),
        ({"strategy": "single", "learners": 1}, "2 learners must be left, and learners is 1: take more"),
        ({"learners": 2}, "2 learners must be left, and learners is 2: take more"),
        ({"statistics_every": 5}, "statistics and an emulated link need a fixed number of ranks"),
        ({"sampler": "fixed"}, "samples are dealt again with sampler 'global' and drop_last"),
        ({"strategy_options": {"compression": "topk"}, "topology": "ring"}, "topk sends differences"),
    ],
)
def test_configs_that_cannot_go_on_are_refused(fields: dict, message: str) -> None:
    known = {"strategy": "dpsgd", "learners": 4, "batch_size": 60, "epochs": 1, "on_failure": "shrink"}
    with pytest.raises(ValueError, match=message) as error:
        TrainConfig(**{**known, **fields})
    assert "\n" not in str(error.value)
