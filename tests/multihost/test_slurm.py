"""The job of ``ddpcore launch --slurm`` on a Slurm cluster of two hosts: it runs, is requeued, and goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from ddpcore.training import TrainConfig, train
from helpers import hosts, ranks, slurm_host

pytestmark = pytest.mark.slow

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
HELPER = ranks.HERE / "slurm_host.py"
FIELDS = {
    "model": "mlp",
    "data": {"name": "digits", "batch_size": 100},
    "strategy": {"name": "dpsgd", "learners": 2},
    "run": {"epochs": 60},
}
TRAIN = ("train", "--out", "first", "model=mlp", "data=digits", "data.batch_size=100", "strategy=dpsgd")
TRAIN += ("strategy.transport=pg", "run.epochs=60")


def await_that(condition: Callable[[], bool], what: str, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def test_a_requeued_job_goes_on_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"there is no {missing[0]}: apt-get install slurmctld slurmd slurm-client")
    folder, work = tmp_path / "slurm", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    slurm_host.write_config(folder, 2)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where torchrun is
    environment = ranks.environment() | {"PATH": path}
    del environment["GLOO_SOCKET_IFNAME"]  # loopback, which two hosts do not share
    with hosts.networks(2) as keepers, ExitStack() as stack:

        def on(host: int, *words: str) -> list[str]:
            return [sys.executable, str(HELPER), str(keepers[host]), str(host), str(folder), *words]

        def ask(*words: str) -> str:
            done = subprocess.run(
                on(0, *words), cwd=work, env=environment, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        daemons = ("slurmd", "-D", "-N", "node0"), ("slurmd", "-D", "-N", "node1"), ("slurmctld", "-D")
        for host, words in zip((0, 1, 0), daemons, strict=True):
            out = stack.enter_context((folder / f"{words[-1]}.out").open("w"))
            daemon = subprocess.Popen(on(host, *words), env=environment, stdout=out, stderr=out)
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
        await_that(lambda: "Running as primary" in text(folder / "ctld.log"), "the controller starts")
        await_that(lambda: ask("sinfo", "--noheader", "-o", "%T %D").split() == ["idle", "2"], "two idle nodes")
        submit = ("--slurm", "--nodes", "2", "--ranks", "1", "--submit", "--", *TRAIN)
        job = ask(sys.executable, "-m", "ddpcore", "launch", *submit).split()[-1]
        record, log = work / "first" / "record.jsonl", work / f"slurm-{job}.out"

        def epochs() -> int:
            return text(record).count('"kind": "epoch"')

        def said() -> str:
            return text(log) + text(folder / "ctld.log")[-2000:]

        await_that(lambda: epochs() > 2, said())
        ask("scontrol", "requeue", job)
        await_that(lambda: (work / "first" / "model.safetensors").exists(), "the job ends")
        await_that(lambda: job not in ask("squeue", "--noheader", "-o", "%i"), "the job leaves the queue")
    kinds = [json.loads(line)["kind"] for line in record.read_text().splitlines()]
    assert kinds.count("resume") == 1 and kinds.count("epoch") == 60, said()
    train(TrainConfig.from_dict(FIELDS), out=tmp_path / "whole")
    resumed, whole = [(folder / "model.safetensors").read_bytes() for folder in (work / "first", tmp_path / "whole")]
    assert resumed == whole
