"""Checks the wheel and the source distribution of ddpcore in dist/, beside several versions of torch and Python.

    tools/release_check.py                             all versions, the wheel and the source distribution
    tools/release_check.py --torch 2.13.0 --python 3.11 --only wheel
    tools/release_check.py --cuda 13                   the wheel for CUDA 13, beside CUDA builds of torch
    tools/release_check.py --write docs/compatibility.md

This Python meets all versions of torch. Every other Python meets the newest torch that it can install. A Python that
is not on this machine gets a row that says so. Each pair has its own environment in build/release, which is made if it
does not exist. Each artifact is installed there, and tested outside of the source tree: tools/smoke.py with torch and
numpy alone, and then the tests in SUITE.
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
VERSIONS = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
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


def interpreter_of(release: str) -> str | None:
    """The command of a Python such as 3.12, also one of pyenv; None if this machine has none that starts."""
    if release == THIS_PYTHON:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [shutil.which(f"python{release}"), *sorted(pyenv.glob(f"{release}.*/bin/python"), reverse=True)]
    return next((str(path) for path in found if path and run(path, "--version")[0]), None)


def environment_of(version: str, release: str, cuda: str | None) -> Path | None:
    """The Python of the environment of a pair, which is made if it does not exist. None if torch does not go in."""
    folder = ROOT / "build" / "release" / f"torch-{version}-py{release}{f'-cu{cuda}' if cuda else ''}"
    python = folder / "bin" / "python"
    if python.exists():
        return python
    print(f"making {folder}", flush=True)
    run(interpreter_of(release), "-m", "venv", folder)
    pip = (python, "-m", "pip", "install", "-q", "numpy")
    ways = [[f"torch=={version}"]]  # on Linux a CUDA build, with several GB of CUDA libraries
    if cuda is None:
        ways = [[f"torch=={version}+cpu"], ["--index-url", CPU_WHEELS, f"torch=={version}+cpu"], *ways]
    for way in ways:
        if run(*pip, *way)[0]:
            return python
    shutil.rmtree(folder, ignore_errors=True)  # venv itself may have failed
    return None


def pairs_of(versions: list[str], releases: list[str], cuda: str | None) -> list[tuple[str, str, str]]:
    """(torch, Python, why not): this Python with all versions of torch, others with the newest that they install."""
    pairs = []
    for release in releases:
        wanted = versions if release == THIS_PYTHON else sorted(versions, key=_as_numbers)[::-1]
        if interpreter_of(release) is None:
            pairs.append((wanted[0], release, "no such Python here"))
            continue
        for version in wanted:
            found = environment_of(version, release, cuda) is not None
            if found or release == THIS_PYTHON:
                pairs.append((version, release, "" if found else "cannot be installed"))
            if found and release != THIS_PYTHON:
                break
        else:
            if release != THIS_PYTHON:
                pairs.append((wanted[0], release, "no version of torch can be installed"))
    return pairs


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


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


def check_install(artifact: Path, version: str, release: str, why_not: str, cuda: str | None) -> dict[str, str]:
    """Install an artifact beside a version of torch, and test it. Returns a row of the table."""
    row = dict.fromkeys(COLUMNS, "-") | {"artifact": artifact.name, "torch": version, "Python": release}
    python = None if why_not else environment_of(version, release, cuda)
    if python is None:
        return row | {"installs": f"not checked: {why_not}"}
    log = ROOT / "build" / "release" / f"{version}-py{release}-{artifact.suffix[1:]}.log"
    log.unlink(missing_ok=True)
    run(python, "-m", "pip", "uninstall", "-q", "-y", "ddpcore")
    torch = run(python, "-c", "import torch; print(torch.__version__)")[1]
    release = run(python, "-c", "import platform; print(platform.python_version())")[1]
    row |= {"torch": torch, "Python": release}
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
    folder = ROOT / "dist"
    suffix = f"+cu{options.cuda}-"
    wheels = [path for path in sorted(folder.glob("*.whl")) if (suffix if options.cuda else "-cp") in path.name]
    wheels = [path for path in wheels if options.cuda or "+" not in path.name]
    sources = [] if options.cuda else sorted(folder.glob("*.tar.gz"))
    found = {"wheel": wheels, "sdist": sources}.get(options.only, [*wheels, *sources])
    if not found:
        target = f"wheel CUDA={options.cuda}" if options.cuda else "wheel sdist"
        raise SystemExit(f"release_check: {folder} holds nothing to check: run 'make {target}' first")
    return found


def main() -> int:
    """Check, print the table, and return 0 if everything passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=",".join(VERSIONS), help="versions, comma-separated")
    parser.add_argument("--python", default=",".join(PYTHONS), help="versions, comma-separated")
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
    pairs = pairs_of(options.torch.split(","), options.python.split(","), options.cuda)
    rows = [check_install(path, *pair, options.cuda) for path in artifacts for pair in pairs]
    table = table_of(rows)
    print(f"\n{table}")
    if options.write is not None:
        before, _, rest = options.write.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        options.write.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    checked = [row for row in rows if not row["installs"].startswith("not checked: no ")]
    wrong += [f"{row['artifact']}, torch {row['torch']}" for row in checked if not _passes(row)]
    wrong += [] if checked else ["nothing could be installed"]
    for line in wrong:
        print(f"release_check: {line}: does not pass; see build/release/*.log", file=sys.stderr)
    return 1 if wrong else 0


def _passes(row: dict[str, str]) -> bool:
    return row["installs"] == "yes" and row["torch and numpy alone"] == "passes" and " passed" in row["tests"][:12]


if __name__ == "__main__":
    sys.exit(main())
