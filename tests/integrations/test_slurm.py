"""``ddpcore launch --slurm``: the job, run by bash with stand-ins for the commands of Slurm and torchrun."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ddpcore.integrations import slurm

TRAIN = ["train", "--out", "runs/first run", "model=mlp", "run.epochs=20"]


def written(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert slurm.main(words) == 0
    return capsys.readouterr().out


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``srun`` runs its words, ``scontrol`` names two nodes, torchrun prints its words, and sbatch copies the job."""
    scripts = {
        "srun": '"$@"',
        "scontrol": 'printf "node7\\nnode8\\n"',
        "torchrun": 'printf "%s\\n" "$@"',
        "sbatch": f"cat > {tmp_path}/submitted; exit 3",
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_the_job_starts_torchrun_on_each_node(capsys: pytest.CaptureFixture[str], stand_ins: Path) -> None:
    job = written(capsys, "--slurm", "--nodes", "2", "--gpus", "8", "--time", "12:00:00", "--", *TRAIN)
    for line in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=12:00:00", "--requeue"):
        assert f"#SBATCH {line}\n" in job
    env = os.environ | {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "41"}
    done = subprocess.run(["bash", "-eu"], input=job, text=True, capture_output=True, env=env, check=True)
    words = done.stdout.splitlines()
    assert words[:4] == ["--nnodes", "2", "--nproc-per-node", "8"]
    assert words[words.index("--rdzv-endpoint") + 1] == "node7:29400"
    assert words[words.index("--rdzv-id") + 1] == "41-0"
    assert words[words.index("-m") :] == ["-m", "ddpcore", "train", "--resume", *TRAIN[1:]]


def test_other_commands_do_not_resume(capsys: pytest.CaptureFixture[str]) -> None:
    job = written(capsys, "--slurm", "--ranks", "2", "--", "doctor", "--parameters", "30")
    assert "-m ddpcore doctor --parameters 30\n" in job and "gpus" not in job and "--nproc-per-node 2" in job


def test_submit(stand_ins: Path) -> None:
    assert slurm.main(["--slurm", "--gpus", "1", "--submit", "--", *TRAIN]) == 3  # the status of sbatch
    assert (stand_ins / "submitted").read_text().startswith("#!/bin/bash\n#SBATCH")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "8", "--", *TRAIN], "name the kind of the job: --slurm"),
        (["--slurm", "--", *TRAIN], "say how many ranks a node has: --gpus N, or --ranks N on nodes without GPUs"),
        (["--slurm", "--gpus", "8"], "the command is missing: add it after --"),
        (["--slurm", "--gpus", "8", "--submit", "--", *TRAIN], "sbatch is not on this machine"),
    ],
)
def test_refusals_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ddpcore launch: {message}") and error.count("\n") == 1
