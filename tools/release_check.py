"""Checks the wheel and the source distribution of ddpcore in dist/, and installs them beside several versions of torch.

    tools/release_check.py                             all versions of torch, the wheel and the source distribution
    tools/release_check.py --torch 2.13.0 --only wheel
    tools/release_check.py --cuda 13                   the wheel in dist/cu13, beside CUDA builds of torch
    tools/release_check.py --write docs/compatibility.md

Every version of torch has its own environment, build/release/torch-VERSION, which is made if it does not exist. Each
artifact is installed there, and tested outside of the source tree: tools/smoke.py with torch and numpy alone, and then
the tests in SUITE.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("2.10.0", "2.11.0", "2.12.1", "2.13.0")
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
MAX_WHEEL_BYTES = 5 * 2**20  # of the CPU wheel
# A few minutes at most, and nothing that needs an extra.
SUITE = (
    *("optim/test_drop_in.py", "optim/test_sgd.py", "optim/test_lars.py", "optim/test_lamb.py", "optim/test_state.py"),
    *("ops/test_steps.py", "ops/test_mix.py", "comm/shared/test_flags.py", "strategies/test_dpsgd.py"),
    *("distributed/test_distribute.py", "distributed/test_compile.py"),
)  # real ranks are in tools/smoke.py
COLUMNS = ("artifact", "torch", "Python", "installs", "torch and numpy alone", "tests")
BEGIN, END = "<!-- release check: begin -->", "<!-- release check: end -->"


def run(*words: object, cwd: Path = ROOT, log: Path | None = None) -> tuple[bool, str]:
    """Whether a command succeeds, and its last line of output; the whole output goes to the log."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True)
    text = done.stdout + done.stderr
    if log is not None:
        with log.open("a") as file:
            file.write(f"$ {' '.join(map(str, words))}\n{text}\n")
    return done.returncode == 0, ((done.stdout.strip() or text.strip()).splitlines() or [""])[-1]


def environment_of(version: str, cuda: str | None) -> Path:
    """The Python of the environment of a version of torch. It is made if it does not exist."""
    folder = ROOT / "build" / "release" / f"torch-{version}{f'-cu{cuda}' if cuda else ''}"
    python = folder / "bin" / "python"
    if python.exists():
        return python
    print(f"making {folder}", flush=True)
    run(sys.executable, "-m", "venv", folder)
    pip = (python, "-m", "pip", "install", "-q", "numpy")
    ways = [[f"torch=={version}"]]  # on Linux a CUDA build, with several GB of CUDA libraries
    if cuda is None:
        ways = [[f"torch=={version}+cpu"], ["--index-url", CPU_WHEELS, f"torch=={version}+cpu"], *ways]
    for way in ways:
        if run(*pip, *way)[0]:
            return python
    shutil.rmtree(folder)
    raise SystemExit(f"release_check: torch {version} cannot be installed: leave it out with --torch")


def check_files(artifacts: list[Path], cuda: str | None) -> list[str]:
    """What is wrong with the files themselves: metadata, size, ABI."""
    wrong = []
    passed, said = run(sys.executable, "-m", "twine", "check", "--strict", *artifacts)
    print(f"twine check --strict: {said}")
    if not passed:
        wrong.append(f"twine: {said}")
    for wheel in (path for path in artifacts if path.suffix == ".whl"):
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.2f} MB")
        if cuda is None and wheel.stat().st_size > MAX_WHEEL_BYTES:
            wrong.append(f"{wheel.name} is larger than {MAX_WHEEL_BYTES / 2**20:.0f} MB")
        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
            words = ("--check", "torch", "-v", Path(folder, "ddpcore"))
            log = ROOT / "build" / "release" / "abi.txt"
            log.unlink(missing_ok=True)
            passed, said = run(Path(sys.executable).parent / "torch-abi-audit", *words, log=log)
            print(log.read_text())
        if not passed:
            wrong.append(f"torch-abi-audit: {said}")
    return wrong


def check_install(artifact: Path, version: str, cuda: str | None) -> dict[str, str]:
    """Install an artifact beside a version of torch, and test it. Returns a row of the table."""
    python = environment_of(version, cuda)
    log = ROOT / "build" / "release" / f"{version}-{artifact.suffix[1:]}.log"
    log.unlink(missing_ok=True)
    run(python, "-m", "pip", "uninstall", "-q", "-y", "ddpcore")
    torch = run(python, "-c", "import torch; print(torch.__version__)")[1]
    release = run(python, "-c", "import platform; print(platform.python_version())")[1]
    row = dict.fromkeys(COLUMNS, "not run") | {"artifact": artifact.name, "torch": torch, "Python": release}
    passed, said = run(python, "-m", "pip", "install", "-q", "--no-cache-dir", artifact, log=log)
    row["installs"] = "yes" if passed else "no"
    if passed:
        with tempfile.TemporaryDirectory() as folder:
            passed, said = run(python, ROOT / "tools" / "smoke.py", cwd=Path(folder), log=log)
            row["torch and numpy alone"] = "passes" if passed else "fails"
            print(f"{torch}: {said}", flush=True)
            run(python, "-m", "pip", "install", "-q", "pytest", log=log)
            for name in ("tests", "pyproject.toml"):  # the tests alone: ddpcore is the installed one
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                copy(ROOT / name, Path(folder, name))
            files = [Path("tests", name) for name in SUITE]
            pytest = (python, "-m", "pytest")
            passed, row["tests"] = run(*pytest, "-q", "-p", "no:cacheprovider", *files, cwd=Path(folder), log=log)
            row["tests"] = ("" if passed else "FAIL: ") + row["tests"].strip("= ")
    print(" | ".join(row.values()), flush=True)
    return row


def table_of(rows: list[dict[str, str]]) -> str:
    """The rows as Markdown."""
    lines = [" | ".join(COLUMNS), " | ".join(["---"] * len(COLUMNS)), *(" | ".join(row.values()) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def artifacts_of(options: argparse.Namespace) -> list[Path]:
    """The files to check. SystemExit if there are none."""
    folder = ROOT / "dist" / f"cu{options.cuda}" if options.cuda else ROOT / "dist"
    patterns = {"wheel": ("*.whl",), "sdist": ("*.tar.gz",)}.get(options.only, ("*.whl", "*.tar.gz"))
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    if not found:
        target = f"wheel CUDA={options.cuda}" if options.cuda else "wheel sdist"
        raise SystemExit(f"release_check: {folder} holds nothing to check: run 'make {target}' first")
    return found


def main() -> int:
    """Check, print the table, and return 0 if everything passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=",".join(VERSIONS), help="versions, comma-separated")
    parser.add_argument("--only", choices=("wheel", "sdist"))
    parser.add_argument("--cuda", choices=("12", "13"), help="check the wheel for this CUDA")
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    options = parser.parse_args()
    for package in ("twine", "torch-abi-audit"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise SystemExit(f"release_check: {package} is not installed: pip install {package}") from None
    if options.cuda is None:
        os.environ["DDPCORE_CUDA"] = "0"  # the source distribution is compiled for the CPU
    (ROOT / "build" / "release").mkdir(parents=True, exist_ok=True)
    artifacts = artifacts_of(options)
    wrong = check_files(artifacts, options.cuda)
    rows = [check_install(path, version, options.cuda) for path in artifacts for version in options.torch.split(",")]
    table = table_of(rows)
    print(f"\n{table}")
    if options.write is not None:
        before, _, rest = options.write.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        options.write.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    wrong += [f"{row['artifact']}, torch {row['torch']}" for row in rows if not _passes(row)]
    for line in wrong:
        print(f"release_check: {line}: does not pass; see build/release/*.log", file=sys.stderr)
    return 1 if wrong else 0


def _passes(row: dict[str, str]) -> bool:
    return row["installs"] == "yes" and row["torch and numpy alone"] == "passes" and " passed" in row["tests"][:12]


if __name__ == "__main__":
    sys.exit(main())
