"""``benchmarks/run_gpu.sh``: its arguments, and that a failed or late step stops no other. Steps do no work."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("ranks", ROOT / "tests" / "helpers" / "ranks.py")
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)
SCRIPT = ROOT / "benchmarks" / "run_gpu.sh"

_spec = importlib.util.spec_from_file_location("summarize", ROOT / "benchmarks" / "summarize.py")
summarize = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(summarize)


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """In Python's place: fails in bench_mix.py, takes its time in bench_lars.py, else does nothing."""
    file = tmp_path / "python"
    file.write_text('#!/bin/sh\ncase "$*" in *bench_mix.py*) exit 3 ;; *bench_lars.py*) exec sleep 60 ;; esac\n')
    file.chmod(0o755)
    return file


def run(arguments: list[str], python: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": str(python)} | variables
    return subprocess.run(["bash", SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "usage: run_gpu.sh OUTDIR"),
        (["out", "--only"], "--only is ''"),
        (["out", "--only", "lint"], "--only is 'lint': choose from build, tests, sanitizer, bench"),
        (["out", "--fast"], "unknown flag --fast"),
        (["out", "more"], "two folders, out and more"),
        (["/proc/nowhere"], "cannot make the folder /proc/nowhere"),
    ],
)
def test_refused(arguments: list[str], says: str, interpreter: Path, tmp_path: Path) -> None:
    done = run([str(tmp_path / a) if a == "out" else a for a in arguments], interpreter)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert says.replace("out ", f"{tmp_path / 'out'} ") in done.stderr


def test_an_interpreter_without_torch_is_refused(tmp_path: Path) -> None:
    done = run([str(tmp_path / "out")], Path("/bin/false"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no torch" in done.stderr


def test_failures_and_time_limits_stop_nothing_else(interpreter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run([str(out), "--only", "bench", "--dry-run"], interpreter, RUN_SECONDS="240")
    assert done.returncode == 1
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    status = {step["step"]: step["status"] for step in steps}
    benches = {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")} - {"bench_learners"}  # of the CPU
    assert benches < set(status)
    assert {"optim-float32", "stats", "buckets", "predict", "comm"} <= set(status)
    assert status.pop("bench_lars") == "timeout"
    assert status.pop("bench_mix") == "failed"
    assert status.pop("study") == "skipped"
    assert set(status.values()) == {"ok"}
    assert (out / "logs" / "bench_lars.log").exists()


def test_what_finds_no_time_left_is_cut_and_listed(interpreter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run([str(out), "--only", "bench", "--dry-run"], interpreter, RUN_SECONDS="40").returncode == 1
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [step["status"] for step in steps if step["step"] in ("optim-float32", "bench_sgd")] == ["ok", "cut"]


def test_all_limits_together_are_less_than_ten_minutes() -> None:
    text = SCRIPT.read_text()
    shares = dict(re.findall(r'^ *(?:\[.*\] \|\| )?(?:step|kernel) "?([\w$-]+)"? (\d+) ', text, re.MULTILINE))
    shares |= dict(re.findall(r"&& step ([\w-]+) (\d+) ", text))
    assert {"build", "pytest", "cpp-compile", "cpp-tests", "sanitizer-$tool", "bench_$name", "comm"} <= set(shares)
    times = {"sanitizer-$tool": 4, "bench_$name": 6, "$name": 2}  # in loops
    total = sum(times.get(name, 1) * int(seconds) for name, seconds in shares.items())
    assert 500 < total <= int(re.search(r"RUN_SECONDS:-(\d+)", text)[1]) < 600


def test_every_bench_takes_the_words_that_it_is_given(tmp_path: Path) -> None:
    """Those of a dry run, one after the other: of toy size, on the CPU."""
    recorder, log = tmp_path / "python", tmp_path / "log"
    recorder.write_text(f'#!/bin/sh\necho "$*" >> {log}\n')
    recorder.chmod(0o755)
    assert run([str(tmp_path / "out"), "--only", "bench", "--dry-run"], recorder).returncode == 0
    commands = [line.split() for line in log.read_text().splitlines() if "bench" in line and "summarize" not in line]
    assert len(commands) == 16
    for command in commands:
        done = ranks.python(*command, cwd=ROOT, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, f"{command}: {done.stderr}"
    rows = [json.loads(line) for line in (tmp_path / "out" / "training.jsonl").read_text().splitlines()]
    assert {row["case"].split()[0] for row in rows} >= {"step", "shm", "training"}
    kinds = [summarize.training_line(row)[0] for row in rows]
    assert "step of resnet18, ours" in kinds
    names = {path.name for path in (tmp_path / "out").glob("*.json")}
    assert names == {f"{name}.json" for name in ("optim-float32", "stats", "buckets", "predict", "comm")}
    assert len(summarize.rows_of(tmp_path / "out")) > len(commands)


@pytest.mark.parametrize(("stage", "status"), [("build", "ok"), ("sanitizer", "skipped")])
def test_one_stage(stage: str, status: str, interpreter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run([str(out), "--dry-run", "--only", stage], interpreter).returncode == 0
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [(step["step"], step["status"]) for step in steps] == [(stage, status)]


# --- the summary -------------------------------------------------------------------------------------------------


def lines(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spread = {"p20": 0.5, "p50": 0.75, "p80": 1.0}
    lines(
        tmp_path / "kernels.jsonl",
        {"case": "sgd_step_", "numel": 1000, "dtype": "float32", "seconds": spread, "gb_per_s": 10.0, "commit": "aa"}
        | {"fraction_of_copy": 0.9, "ratio": spread, "baseline": "torch"},
    )
    side = {
        "comparison": "A / B",
        "list": "lenet5",
        "dtype": "float32",
        "ms": spread,
        "ratio": spread,
        "device": "cuda",
    }
    environment = {"device": "A GPU", "commit": None}
    result = {"environment": environment, "rows": [{**side, "implementation": name} for name in "AB"]}
    (tmp_path / "optim-float32.json").write_text(json.dumps(result))
    (tmp_path / "gpu.csv").write_text(
        "name, driver_version, clocks.current.sm [MHz]\nA GPU, 1.2, 900\nA GPU, 1.2, 1000\nA GPU, 1.2, 1700\n"
    )
    lines(
        tmp_path / "steps.jsonl",
        {"step": "build", "status": "ok", "seconds": 5, "limit": 9, "note": ""},
        {"step": "pytest", "status": "timeout", "seconds": 9, "limit": 9, "note": "see"},
    )
    monkeypatch.setattr("sys.argv", ["summarize", str(tmp_path), "--commit", "bb"])
    monkeypatch.setattr(
        summarize, "machine", lambda device: dict.fromkeys(("device", "torch", "cuda", "python", "commit"))
    )
    summarize.main()
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["commit"] for row in rows] == ["aa", "bb", "bb"]
    assert rows[1]["device"] == "cuda" and rows[1]["device_name"] == "A GPU"
    for row in rows:
        assert row["gpu"]["driver_version"] == "1.2"
        assert row["gpu"]["clocks.current.sm [MHz]"] == {"min": 900, "median": 1000, "max": 1700}
    text = (tmp_path / "summary.md").read_text()
    assert "Cut short or not begun: pytest." in text
    assert "| sgd_step_ | 1,000 | float32 | 750.0000 | 10.0 | 90% | 0.75 [0.50-1.00] | torch |" in text
    assert text.count("| A / B |") == 1
    assert "commit bb" in text


def test_an_empty_folder_has_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["summarize", str(tmp_path)])
    summarize.main()
    assert "nothing" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "results.jsonl").read_text() == ""
