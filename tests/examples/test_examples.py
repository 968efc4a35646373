"""Every script of ``examples/`` runs, says what it should, and is short enough to start from."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import ranks

EXAMPLES = ranks.ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
MAX_LINES = 80


def run(folder: Path, script: str, *words: object) -> str:
    """What the script prints as a process of its own."""
    done = ranks.python(EXAMPLES / script, *words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(folder: Path, script: str, *words: object) -> str:
    """What the script prints on the two ranks that torchrun starts."""
    done = ranks.torchrun([EXAMPLES / script, *words], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def two_ranks(folder: Path, script: str, *words: object, num: int = 2) -> list[str]:
    """What each rank prints, started with torchrun's variables and without the seconds that torchrun takes."""
    return ranks.printed(ranks.as_torchrun([EXAMPLES / script, *words], folder, num))


def numbers(pattern: str, text: str) -> list[float]:
    found = [float(number) for number in re.findall(pattern, text)]
    assert found, f"{pattern!r} is not in {text!r}"
    return found


def test_every_script_is_short_listed_and_tested() -> None:
    page, tests = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    assert sorted(re.findall(r"^\| \[(\w+\.py)\]\(\1\) \| .+ \|$", page, re.MULTILINE)) == SCRIPTS
    for script in SCRIPTS:
        assert len((EXAMPLES / script).read_text().splitlines()) <= MAX_LINES, script
        assert f'"{script}"' in tests, f"no test runs {script}"


def test_fused_lamb(tmp_path: Path) -> None:
    printed = run(tmp_path, "fused_lamb.py", "--steps", 60, "--batch-size", 256)
    losses = numbers(r"loss ([\d.]+)", printed)
    assert losses[-1] < 0.5 * losses[0]
    assert printed.count("trust ratio") == 6
    assert numbers(r"bias: trust ratio (\S+)", printed) == [1, 1, 1]


@pytest.mark.parametrize("strategy", ["ddp", "ssgd"])
def test_ddp_to_gossip(tmp_path: Path, strategy: str) -> None:
    first, second = two_ranks(tmp_path, "ddp_to_gossip.py", "--strategy", strategy, "--steps", 60, "--batch-size", 64)
    check_gossip(first, strategy)
    assert second == ""


@pytest.mark.slow
def test_gossip_under_torchrun(tmp_path: Path) -> None:
    check_gossip(torchrun(tmp_path, "ddp_to_gossip.py", "--steps", 60, "--batch-size", 64), "dpsgd")


def check_gossip(printed: str, strategy: str) -> None:
    assert printed.startswith(f"{strategy}, 2 ranks")
    assert numbers(r"averaged model ([\d.]+)", printed)[0] > 0.5  # of ten classes
    (distance,) = numbers(r"consensus distance (\S+)", printed)
    assert (distance > 0) == (strategy == "dpsgd")


def test_virtual_learners(tmp_path: Path) -> None:
    printed = run(tmp_path, "virtual_learners.py", "--learners", 4, "--steps", 60)
    assert len(printed.splitlines()) == 4
    assert min(numbers(r"accuracy ([\d.]+)", printed)) > 0.5
    sent = numbers(r"(\d+) bytes sent", printed)
    assert sent[3] < sent[2] < sent[1] and sent[2] < sent[0]  # period 8, one neighbour, two neighbours; all-reduce


def test_diloco_is_the_same_on_ranks(tmp_path: Path) -> None:
    words = ("--steps", 60, "--period", 10)
    virtual = run(tmp_path, "diloco.py", "--learners", 2, *words)
    accuracies = numbers(r"model ([\d.]+)", virtual)
    assert len(accuracies) == 6 and accuracies[-1] > accuracies[0]
    assert two_ranks(tmp_path, "diloco.py", *words) == [virtual, ""]


def test_a_resumed_loop_has_the_same_weights(tmp_path: Path) -> None:
    words = ("--learners", 3, "--steps", 24, "--save-every", 5, "--folder")
    whole = run(tmp_path, "save_and_resume.py", *words, "whole")
    stopped = run(tmp_path, "save_and_resume.py", *words, "stopped", "--stop-after", 13)
    resumed = run(tmp_path, "save_and_resume.py", *words, "stopped")
    assert "continues after step 10" in resumed
    assert stopped != whole
    assert resumed.splitlines()[-1] == whole.splitlines()[-1]


def test_a_resumed_loop_has_the_same_weights_on_ranks(tmp_path: Path) -> None:
    words = ("--steps", 24, "--save-every", 5, "--folder")
    whole = two_ranks(tmp_path, "save_and_resume.py", *words, "whole")
    two_ranks(tmp_path, "save_and_resume.py", *words, "stopped", "--stop-after", 13)
    resumed = two_ranks(tmp_path, "save_and_resume.py", *words, "stopped")
    assert whole[0].split()[-1] != whole[1].split()[-1]
    for rank in range(2):
        assert resumed[rank].splitlines() == [f"rank {rank} continues after step 10", *whole[rank].splitlines()]


def test_noise_scale(tmp_path: Path) -> None:
    printed = run(tmp_path, "noise_scale.py", "--steps", 120, "--every", 40)
    assert [line.split(":")[0] for line in printed.splitlines()] == ["step 40", "step 80", "step 120"]
    assert len(numbers(r"noise scale (\d+) samples", printed)) >= 1


def test_own_strategy(tmp_path: Path) -> None:
    printed = run(tmp_path, "own_strategy.py", "--steps", 60)
    assert numbers(r"averaged model ([\d.]+)", printed)[0] > 0.5
    assert numbers(r"consensus distance (\S+)", printed)[0] > 0
    assert "the same bits" in run(tmp_path, "own_strategy.py", "--check")


def test_train_run_is_the_same_on_ranks(tmp_path: Path) -> None:
    words = ("--learners", 2, "--epochs", 2)
    virtual = run(tmp_path, "train_run.py", *words, "--out", "virtual")
    ran = run(tmp_path, "train_run.py", *words, "--ranks", 2, "--out", "ranks")
    for what in ("loss", "accuracy"):
        found = numbers(rf"{what} ([\d.]+)", virtual)
        assert len(found) == 2 and found == numbers(rf"{what} ([\d.]+)", ran)
    assert (tmp_path / "ranks" / "model.safetensors").is_file()


def test_average_for_deployment(tmp_path: Path) -> None:
    printed = run(tmp_path, "average_for_deployment.py", "--steps", 60, "--out", "averaged.safetensors")
    assert min(numbers(r"accuracy ([\d.]+)", printed)) > 0.5
    assert f"{(tmp_path / 'averaged.safetensors').stat().st_size} bytes" in printed


@pytest.mark.slow
def test_fsdp2_diloco(tmp_path: Path) -> None:
    printed, *others = two_ranks(tmp_path, "fsdp2_diloco.py", "--steps", 60, num=4)
    assert numbers(r"accuracy ([\d.]+)", printed)[0] > 0.5 and others == ["", "", ""]
    assert numbers(r"consensus distance ([\d.]+)", printed) == [0]  # the last step averages


@pytest.mark.slow
def test_fsdp2_lamb(tmp_path: Path) -> None:
    words = ("--steps", 40, "--batch-size", 256, "--folder", "fsdp2")
    first, second = two_ranks(tmp_path, "fsdp2_lamb.py", *words)
    losses = numbers(r"loss ([\d.]+)", first)
    assert losses[-1] < 0.6 * losses[0]
    assert first.count("trust ratio") == 6 and second == ""
    resumed, _ = two_ranks(tmp_path, "fsdp2_lamb.py", *words)
    assert resumed.startswith("step 41: ")
    assert numbers(r"loss ([\d.]+)", resumed)[-1] < losses[-1]


def process(folder: Path, script: str, *words: object, needs: str) -> str:
    """What the script prints, as a process of its own, if the package that it needs is installed."""
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed: see the first lines of examples/{script}")
    command = [sys.executable, str(EXAMPLES / script), *map(str, words)]
    patient = {"RAY_raylet_start_wait_time_s": "300", "RAY_agent_register_timeout_ms": "300000"}  # on a busy machine
    env = ranks.environment() | patient | {"RAY_DEDUP_LOGS": "0"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_ray_train(tmp_path: Path) -> None:
    """A worker dies, Ray starts all again, and both have the weights of a run in which nobody died."""
    sums, words = r"rank \d: the sum of all weights is \S+", ("--steps", 30, "--out")
    whole = process(tmp_path, "ray_train.py", *words, "runs/whole", needs="ray")
    died = process(tmp_path, "ray_train.py", *words, "runs/died", "--dies-at", 25, needs="ray")
    assert "continues after" not in whole and (tmp_path / "runs" / "died" / "died").exists()
    assert set(re.findall(r"rank (\d) continues after step [12]0", died)) == {"0", "1"}
    assert len(set(re.findall(sums, whole))) == 2 and set(re.findall(sums, whole)) == set(re.findall(sums, died))
    more = process(tmp_path, "ray_train.py", "--steps", 40, "--workers", 3, "--out", "runs/whole", needs="ray")
    assert set(re.findall(r"rank (\d) continues after step 30", more)) == {"0", "1", "2"}
    assert len(set(re.findall(sums, more))) == 3


@pytest.mark.slow
def test_torchtitan_lamb(tmp_path: Path) -> None:
    printed = process(tmp_path, "torchtitan_lamb.py", "--steps", 6, needs="torchtitan")
    losses = numbers(r"loss ([\d.]+)", printed)
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.3
    assert printed.splitlines()[-1].endswith("entries of state, by the names of the parameters")


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells, in their order. All strategies learn, and only SSGD's learners stay together."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = json.loads((EXAMPLES / "gossip_on_a_laptop.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "the notebook is kept without outputs"
            exec("".join(cell["source"]), names)
    for name, (errors, distances) in names["results"].items():
        assert errors[-1] < 0.1 and (distances[-1] < 1e-5) == (name == "SSGD")
