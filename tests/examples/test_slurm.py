"""``slurm_train.sh``, run by bash with stand-ins for the commands of Slurm and torchrun."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "slurm_train.sh"
TRAIN = ["--out", "runs/first run", "model=mlp", "run.epochs=20"]


STAND_INS = {"srun": '"$@"', "scontrol": 'printf "node7\\nnode8\\n"', "torchrun": 'printf "%s\\n" "$@"'}


@pytest.mark.parametrize("given", [{}, {"RANKS": "2", "PORT": "30000"}])
def test_the_job_starts_torchrun_on_each_node(given: dict[str, str], tmp_path: Path) -> None:
    """``srun`` runs its words, ``scontrol`` names two nodes, and torchrun prints its words."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "41"}
    env = os.environ | slurm | given | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-eu", str(SCRIPT), *TRAIN], text=True, capture_output=True, env=env, check=True)
    words = done.stdout.splitlines()
    assert words[:4] == ["--nnodes", "2", "--nproc-per-node", given.get("RANKS", "gpu")]
    assert words[words.index("--rdzv-endpoint") + 1] == f"node7:{given.get('PORT', 29400)}"
    assert words[words.index("--rdzv-id") + 1] == "41-0"
    assert words[words.index("-m") :] == ["-m", "ddpcore", "train", "--resume", *TRAIN]


def test_slurm_requeues_the_job_and_warns_it() -> None:
    lines = SCRIPT.read_text().splitlines()
    first = next(place for place, line in enumerate(lines) if line and not line.startswith("#"))
    for flag in ("--ntasks-per-node=1", "--requeue", "--open-mode=append", "--signal=TERM@120"):
        assert f"#SBATCH {flag}" in lines[:first], "sbatch reads no flags after the first command"
