"""``benchmarks/run_gpu.sh``: its arguments, and that a failed or late step stops no other. Steps do no work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import gpu_needs
import pytest
import summarize

from helpers import ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "run_gpu.sh"


def script(file: Path, *lines: str) -> Path:
    """An executable that writes its words to a log beside it, and then runs these lines."""
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(["#!/bin/sh", f'echo "$*" >> {file}.log', *lines]) + "\n")
    file.chmod(0o755)
    return file


def stand_in(folder: Path, *cases: str, needs: str = "2 - build/temp -") -> Path:
    """In Python's place: says what ``gpu_needs.py`` would of a machine, does what the cases say, else nothing."""
    answers = (f'*gpu_needs.py*) echo "{needs}" ;;', *cases)
    return script(folder / "python", 'case "$*" in', *answers, "esac")


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """In Python's place: fails in bench_mix.py, takes its time with the rule lars, else does nothing."""
    return stand_in(tmp_path, "*bench_mix.py*) exit 3 ;;", "*bench_rules.py*lars*) exec sleep 60 ;;")


def run(arguments: list[str], python: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": str(python)} | variables
    return subprocess.run(["bash", SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=900)


def steps_of(out: Path) -> dict[str, tuple[str, str]]:
    """Status and note of each step."""
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    return {step["step"]: (step["status"], step["note"]) for step in steps}


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


def test_what_is_no_interpreter_is_refused(tmp_path: Path) -> None:
    done = run([str(tmp_path / "out")], Path("/bin/false"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "set PYTHON to an interpreter with torch" in done.stderr


# --- what the machine has ----------------------------------------------------------------------------------------


def test_all_that_is_missing_is_named_before_anything_starts(tmp_path: Path) -> None:
    says = "python lacks torch, nvcc: install"
    python = script(tmp_path / "python", f"echo {says}", "exit 2")
    done = run([str(tmp_path / "out")], python)
    assert (done.returncode, done.stderr) == (2, f"run_gpu.sh: {says}\n")
    assert len(Path(f"{python}.log").read_text().splitlines()) == 1
    assert not (tmp_path / "out" / "steps.jsonl").exists()


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_needs, "ALWAYS", ("torch", "no_such_module"))
    monkeypatch.setattr(gpu_needs, "TO_BUILD", ("nor_this_one",))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert gpu_needs.missing("cuda", builds=False) == ["no_such_module"]
    all_of_it = gpu_needs.missing("cuda", builds=True)
    assert [one for one in all_of_it if one != "Python.h"] == [
        "no_such_module",
        "nor_this_one",
        "g++",
        "nvcc (set CUDA_HOME)",
    ]
    monkeypatch.setattr("sys.argv", ["gpu_needs", "--device", "cuda"])
    assert gpu_needs.main() == 2
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and all(name in said for name in all_of_it)


def test_what_the_script_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a dry run: two ranks, no architecture; a program that is no module is looked for on the path."""
    monkeypatch.setattr(gpu_needs, "TO_TEST", ("pytest", "no_such_module"))
    monkeypatch.setattr(gpu_needs.shutil, "which", lambda name: "/bin/g++" if name == "g++" else None)
    monkeypatch.setattr("sys.argv", ["gpu_needs", "--no-build"])
    assert gpu_needs.main() == 0
    num_gpus, architecture, objects, nvcc, *absent = capsys.readouterr().out.split()
    assert (num_gpus, architecture, nvcc, absent) == ("2", "-", "-", ["ninja", "no_such_module"])
    assert objects.startswith("build/temp.") and objects.endswith(sys.implementation.cache_tag)


def test_a_compiler_that_is_not_on_the_path_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    compiler = script(tmp_path / "bin" / "nvcc")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert gpu_needs.nvcc() == str(compiler)


def test_what_can_be_done_without(tmp_path: Path) -> None:
    """Without networkx no file that imports it is collected, nor one whose helper does; without pytest none is."""
    python = stand_in(tmp_path, needs="1 9.0 build/temp - networkx")
    assert run([str(tmp_path / "out"), "--only", "tests"], python).returncode == 0
    (words,) = [line.split() for line in Path(f"{python}.log").read_text().splitlines() if "-m pytest" in line]
    ignored = {word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")}
    assert {"tests/strategies/test_invariants.py", "tests/distributed/test_device_ranks.py"} <= ignored
    assert "tests/distributed/test_device.py" not in ignored
    status = steps_of(tmp_path / "out")
    assert status["pytest"] == ("ok", "")
    assert status["needs"] == ("skipped", "not installed: networkx; what needs it is left out or slower")
    python = stand_in(tmp_path, needs="1 9.0 build/temp - pytest networkx")
    assert run([str(tmp_path / "out"), "--only", "tests"], python).returncode == 0
    assert steps_of(tmp_path / "out")["pytest"] == ("skipped", "pytest is not installed")


def test_one_gpu_has_nothing_between_ranks_to_measure(tmp_path: Path) -> None:
    python = stand_in(tmp_path, needs="1 9.0 build/temp nvcc")
    assert run([str(tmp_path / "out"), "--only", "bench"], python).returncode == 0
    status = steps_of(tmp_path / "out")
    for name in ("buckets", "predict", "comm"):
        assert status[name][0] == "skipped" and "share a GPU" in status[name][1]
    assert "--world-size 1" not in Path(f"{python}.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "case", "why"),
    [
        ([], "*setup.py*) exit 1 ;;", "the build failed: see logs/build.log"),
        (["--only", "bench"], "*machine.kernels*) exit 1 ;;", "no kernels for cpu can be loaded: see logs/kernels.log"),
    ],
)
def test_nothing_is_measured_without_kernels(arguments: list[str], case: str, why: str, tmp_path: Path) -> None:
    """The steps would measure the reference implementations in torch instead."""
    out = tmp_path / "out"
    assert run([str(out), "--dry-run", *arguments], stand_in(tmp_path, case)).returncode == 1
    status = steps_of(out)
    status.pop("build", None)
    assert status == dict.fromkeys(arguments[1:] or ["tests", "sanitizer", "bench"], ("skipped", why))


def test_the_check_for_kernels_runs_on_the_package() -> None:
    """Its code runs with the real package. Every other test replaces the interpreter."""
    code = re.search(r"-c '(.*machine\.kernels.*)' \$device", SCRIPT.read_text())
    assert code is not None
    words = [sys.executable, "-c", code[1], "none"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_tests_are_linked_with_the_objects_of_this_interpreter(tmp_path: Path) -> None:
    """Not with those of CMake, of another Python, or of a source that is no more."""
    for name in ("benchmarks/run_gpu.sh", "csrc/cpu/sgd.cpp", "csrc/cuda/sgd.cu", "tests/cpp/test_cuda_kernels.cpp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    ours = {"build/temp.this/csrc/cpu/sgd.o", "build/temp.this/csrc/cuda/sgd.o"}
    others = {"build/cmake/csrc/cpu/sgd.o", "build/temp.other/csrc/cpu/sgd.o", "build/temp.this/csrc/cpu/gone.o"}
    for name in ours | others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "g++")  # which finds GoogleTest
    compiler = script(tmp_path / "bin" / "compiler", "cp /bin/true build/cpp-tests")
    python = stand_in(tmp_path, needs=f"1 9.0 build/temp.this {compiler}")
    words = ["bash", tmp_path / "benchmarks" / "run_gpu.sh", tmp_path / "out", "--only", "tests"]
    environment = os.environ | {"PYTHON": str(python), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout
    steps = steps_of(tmp_path / "out")
    assert (steps["cpp-tests"][0], steps["cpp-tests-slow-doubles"][0]) == ("ok", "ok")
    compile, link = (line.split() for line in Path(f"{compiler}.log").read_text().splitlines())
    assert "tests/cpp/test_cuda_kernels.cpp" in compile and "build/cpp-objects/test_cuda_kernels.cpp.o" in compile
    assert {word for word in link if word.endswith(".o") and "cpp-objects" not in word} == ours


# --- the steps ---------------------------------------------------------------------------------------------------


def test_failures_and_time_limits_stop_nothing_else(interpreter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run([str(out), "--only", "bench", "--dry-run"], interpreter, RUN_SECONDS="150")
    assert done.returncode == 1
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    status = {step["step"]: step["status"] for step in steps}
    benches = {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")} - {
        "bench_learners",
        "bench_guards",
        "bench_hessian",
        "bench_rank_steps",
        "bench_sharded",
    }  # of the CPU
    assert benches < {name.partition("-")[0] for name in status}
    assert {"strategies", "buckets", "predict", "comm"} <= set(status)
    assert status.pop("bench_rules-lars") == "timeout"
    assert status.pop("bench_mix") == "failed"
    assert status.pop("study") == "skipped"
    assert set(status.values()) == {"ok"}
    assert (out / "logs" / "bench_rules-lars.log").exists()


def test_what_finds_no_time_left_is_cut_and_listed(interpreter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run([str(out), "--only", "bench", "--dry-run"], interpreter, RUN_SECONDS="40").returncode == 1
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [step["status"] for step in steps if step["step"] in ("bench_optim-float32", "bench_rules-sgd")] == [
        "ok",
        "cut",
    ]


def test_all_limits_together_are_less_than_ten_minutes() -> None:
    text = SCRIPT.read_text()
    shares = dict(re.findall(r'^ *(?:\[.*\] \|\| )?(?:step|kernel) "?([\w$-]+)"? (\d+) ', text, re.MULTILINE))
    assert {"build", "pytest", "cpp-compile", "cpp-link", "cpp-tests", "sanitizer-$tool", "bench_$name", "comm"} <= set(
        shares
    )
    times = {"bench_$name": 6, "$name": 2}  # in loops; the sanitizers' share is that of one, they run side by side
    total = sum(times.get(name, 1) * int(seconds) for name, seconds in shares.items())
    stages = dict(re.findall(r"\[(\w+)\]=(\d+)", text))
    assert {name: int(seconds) for name, seconds in stages.items()} == {
        "build": int(shares["build"]),
        "tests": sum(int(shares[name]) for name in shares if name == "pytest" or name.startswith("cpp-")),
        "sanitizer": int(shares["sanitizer-$tool"]), "bench": 0,
    }  # fmt: skip
    assert 500 < total <= int(re.search(r"RUN_SECONDS:-(\d+)", text)[1]) < 600


def test_every_bench_takes_the_words_that_it_is_given(tmp_path: Path) -> None:
    """Those of a dry run, one after the other: of toy size, on the CPU."""
    recorder = stand_in(tmp_path)
    assert run([str(tmp_path / "out"), "--only", "bench", "--dry-run"], recorder).returncode == 0
    lines = Path(f"{recorder}.log").read_text().splitlines()
    commands = [line.split() for line in lines if "ddpcore.bench " in line or "/bench_" in line]
    assert len(commands) == 19
    for command in commands:
        done = ranks.python(*command, cwd=ROOT, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, f"{command}: {done.stderr}"
    rows = [json.loads(line) for line in (tmp_path / "out" / "training.jsonl").read_text().splitlines()]
    assert {row["case"].split()[0] for row in rows} >= {"step", "shm", "training"}
    kinds = [summarize.training_line(row)[0] for row in rows]
    assert "step of resnet18, ours" in kinds
    names = {path.name for path in (tmp_path / "out").glob("*.json")}
    assert names == {f"{name}.json" for name in ("optim-float32", "strategies", "buckets", "predict", "comm")}
    assert len(summarize.rows_of(tmp_path / "out")) > len(commands)


def test_memory_checkers_run_side_by_side(tmp_path: Path) -> None:
    """Each is a step of its own, one that finds something fails, and the option has the name that the version knows."""
    (tmp_path / "bin").mkdir()
    checker = script(
        tmp_path / "bin" / "compute-sanitizer",
        'case "$*" in',
        "--help) echo --kernel-name; exec seq 100000 ;;",  # more than a pipe holds
        # each waits for the others to have begun
        f"*) touch {tmp_path}/$2; while [ $(ls {tmp_path} | grep -c check) -lt 4 ]; do sleep 0.05; done ;;",
        "esac",
        '[ "$2" != racecheck ] || exit 86',
    )
    python = stand_in(tmp_path, needs="1 9.0 build/temp -")
    path = f"{checker.parent}:{os.environ['PATH']}"
    done = run([str(tmp_path / "out"), "--only", "sanitizer"], python, PATH=path)
    assert done.returncode == 1, done.stdout
    status = steps_of(tmp_path / "out")
    assert {name: status[f"sanitizer-{name}"][0] for name in ("memcheck", "racecheck", "synccheck", "initcheck")} == {
        "memcheck": "ok", "racecheck": "failed", "synccheck": "ok", "initcheck": "ok",
    }  # fmt: skip
    words = [line.split() for line in Path(f"{checker}.log").read_text().splitlines() if "--tool" in line]
    assert {line[1]: "--kernel-name" in line for line in words} == {
        "memcheck": True, "racecheck": True, "synccheck": True, "initcheck": False,
    }  # fmt: skip


def test_what_is_skipped_leaves_its_time_to_others(tmp_path: Path) -> None:
    """Without GoogleTest and two GPUs the last steps may take what those would have."""
    python = stand_in(tmp_path, needs="1 9.0 build/temp -")
    assert run([str(tmp_path / "out"), "--only", "bench"], python).returncode == 0
    text = (tmp_path / "out" / "steps.jsonl").read_text()
    limits = {step["step"]: step["limit"] for step in map(json.loads, text.splitlines())}
    assert limits["bench_optim-float32"] == 60, (
        "no more than twice its own, though the stages before it were not asked for"
    )


@pytest.mark.parametrize(("frame", "status"), [("void at::native::fill()", "ok"), ("ddpcore::cuda::mix()", "failed")])
def test_errors_in_kernels_of_others_are_accepted(frame: str, status: str, tmp_path: Path) -> None:
    """The checkers end with 86 for an error in any kernel, torch's too."""
    checker = script(
        tmp_path / "bin" / "compute-sanitizer",
        "echo 'mixes of ddpcore::cuda'",  # what the program prints is no frame
        f"echo '=========     at {frame}+0x100'",
        "exit 86",
    )
    python = stand_in(tmp_path, needs="1 9.0 build/temp -")
    path = f"{checker.parent}:{os.environ['PATH']}"
    run([str(tmp_path / "out"), "--only", "sanitizer"], python, PATH=path)
    steps = steps_of(tmp_path / "out")
    assert {steps[f"sanitizer-{tool}"][0] for tool in ("memcheck", "initcheck")} == {status}


def test_the_toolkit_of_cuda_is_named(tmp_path: Path) -> None:
    python = stand_in(tmp_path, f'*setup.py*) echo "$CUDA_HOME" > {tmp_path}/home ;;')
    for given in ("", "/opt/cuda"):
        assert run([str(tmp_path / "out"), "--dry-run", "--only", "build"], python, CUDA_HOME=given).returncode == 0
        usual = "/usr/local/cuda" if Path("/usr/local/cuda").is_dir() else ""
        assert (tmp_path / "home").read_text().strip() == (given or usual)


def test_results_are_packed(tmp_path: Path) -> None:
    """Two files remain, so that a machine that returns few files returns all."""
    out = tmp_path / "out"
    python = stand_in(tmp_path, f"*summarize.py*) touch {out}/summary.md ;;")
    for _ in range(2):  # a second run replaces the archive of the first
        assert run([str(out), "--dry-run", "--only", "build", "--pack"], python).returncode == 0
        assert {path.name for path in out.iterdir()} == {"records.tar.gz", "summary.md"}
        with tarfile.open(out / "records.tar.gz") as archive:
            names = {name.removeprefix("./") for name in archive.getnames()}
        assert {"steps.jsonl", "logs/build.log"} <= names
        assert "summary.md" not in names and "records.tar.gz" not in names


@pytest.mark.parametrize(("stage", "status"), [("build", "ok"), ("sanitizer", "skipped")])
def test_one_stage(stage: str, status: str, interpreter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run([str(out), "--dry-run", "--only", stage], interpreter).returncode == 0
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [(step["step"], step["status"]) for step in steps] == [(stage, status)]
