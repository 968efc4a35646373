"""A source distribution holds all that builds, tests, measures and explains the package, and nothing that was made."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from ddpcore.runtime.version import VERSION
from helpers import forked

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("csrc", "ddpcore", "tests", "docs", "benchmarks", "tools", "examples")
FILES = (
    *("setup.py", "pyproject.toml", "MANIFEST.in", "CMakeLists.txt", "Makefile", "constraints.txt"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "CITATION.cff", "SECURITY.md"),
)
MADE = ("*.so", "__pycache__", ".*_cache", ".hypothesis", "_build")


def setup(tree: Path, *words: str, **variables: str) -> None:
    """``python setup.py``, without the seconds in which it imports torch."""
    environment = os.environ | {"DDPCORE_CUDA": "0"} | variables
    done = forked.run([str(tree / "setup.py"), "-q", *words], cwd=tree, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], dict[str, bytes]]:
    """The files of a copy of the repository, and those of the archive that is made from it."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in FOLDERS:
        if (ROOT / folder).exists():
            shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns(*MADE))
    for file in FILES:
        shutil.copy(ROOT / file, tree)
    sources = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    for left in ("ddpcore/_ops.abi3.so", "csrc/__pycache__/left.pyc", "tests/ops/__pycache__/left.pyc"):
        (tree / left).parent.mkdir(exist_ok=True)
        (tree / left).touch()
    setup(tree, "sdist", "--dist-dir", "made")
    (tarball,) = (tree / "made").iterdir()
    assert tarball.name == f"ddpcore-{VERSION}.tar.gz"
    held = {}
    with tarfile.open(tarball) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None:
                held[member.name.partition("/")[2]] = file.read()
    return sources, held


def test_every_source_is_in_the_archive(made: tuple[set[str], dict[str, bytes]]) -> None:
    sources, held = made
    named = {"csrc/math.h", "csrc/cuda/sgd.cu", "ddpcore/py.typed", "docs/architecture.md", "tests/optim/test_sgd.py"}
    assert named | {"benchmarks/common.py", "tools/smoke.py", "CITATION.cff"} <= sources
    assert not sources - set(held)


def test_nothing_that_was_made_is_in_the_archive(made: tuple[set[str], dict[str, bytes]]) -> None:
    sources, held = made
    more = {name for name in set(held) - sources if ".egg-info/" not in name}
    assert more == {"PKG-INFO", "setup.cfg"}


def test_the_metadata_ask_for_torch_and_numpy_alone(made: tuple[set[str], dict[str, bytes]]) -> None:
    """Beside typing_extensions, which torch needs too, and tomli in Python 3.10."""
    metadata = made[1]["PKG-INFO"].decode()
    needed = [line for line in re.findall("^Requires-Dist: (.*)$", metadata, re.MULTILINE) if "extra ==" not in line]
    assert {re.match(r"[\w-]+", line)[0] for line in needed} == {"torch", "numpy", "typing_extensions", "tomli"}  # type: ignore[index]
    extras = re.findall("^Provides-Extra: (.*)$", metadata, re.MULTILINE)
    trainers = ["lightning", "transformers", "accelerate"]
    assert extras == ["train", "bench", "report", *trainers, "docs", "all", "dev"]
    assert f"\nVersion: {VERSION}\n" in metadata
    assert "\nLicense-Expression: BSD-3-Clause\n" in metadata


def test_every_place_names_the_same_version() -> None:
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


def test_a_wheel_for_cuda_says_so_in_its_version(made: tuple[set[str], dict[str, bytes]], tmp_path: Path) -> None:
    """From the archive, whose setup.cfg must not undo it. The suffix has no number: a number would need CUDA here."""
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "ddpcore/runtime/version.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(made[1][name])
    setup(tmp_path, "egg_info", DDPCORE_LOCAL_VERSION="cu")
    (metadata,) = tmp_path.rglob("PKG-INFO")
    assert f"\nVersion: {VERSION}+cu\n" in metadata.read_text()


def prepared(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What setup.py decides beside a torch that says that it is built for CUDA; it compiles nothing."""
    script = folder / "prepared.py"
    script.write_text(
        "import os, runpy, sys, torch; torch.version.cuda = '13.0'; sys.argv = ['setup.py', '--name']\n"
        "runpy.run_path('setup.py', run_name='__main__'); print(os.environ['CUDA_HOME'])"
    )
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = {key: value for key, value in os.environ.items() if key not in ("CUDA_HOME", "CUDA_PATH")}
    environment |= {"DDPCORE_CUDA": "1", "PATH": path} | variables
    return forked.run([str(script)], cwd=ROOT, env=environment, timeout=900)


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """A CUDA toolkit, and in another folder of the path a script that calls its nvcc."""
    home = tmp_path / "cuda"
    for name in ("cuda/bin/nvcc", "cuda/include/cuda_runtime.h", "bin/nvcc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f'#!/bin/sh\necho "#$ TOP={home}/bin/.." >&2\n')
        (tmp_path / name).chmod(0o755)
    return home


def test_a_script_that_calls_nvcc_leads_to_its_toolkit(toolkit: Path) -> None:
    done = prepared(toolkit.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(toolkit)


def test_a_wrong_folder_is_one_line_that_names_the_right_one(toolkit: Path, tmp_path: Path) -> None:
    wrong = str(tmp_path / "bin")
    done = prepared(toolkit.parent, CUDA_HOME=wrong)
    assert done.returncode == 1
    line = f"ddpcore: {wrong} has no bin/nvcc or no include/cuda_runtime.h: set CUDA_HOME={toolkit}"
    assert done.stderr.splitlines()[-1] == line
