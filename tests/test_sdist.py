"""A source distribution holds all that it is built from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("csrc", "ddpcore", "tests/cpp", "tests/cuda_on_cpu")
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CMakeLists.txt", "Makefile")


def test_every_source_is_in_the_tarball(tmp_path: Path) -> None:
    for folder in FOLDERS:
        unmade = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=unmade)
    for file in FILES:
        shutil.copy(ROOT / file, tmp_path)
    sources = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"csrc/math.h", "csrc/cuda/sgd.cu", "ddpcore/runtime/machine.py"} < sources
    for made in ("ddpcore/_ops.abi3.so", "csrc/__pycache__/left.pyc"):
        (tmp_path / made).parent.mkdir(exist_ok=True)
        (tmp_path / made).touch()
    words = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", "made"]
    environment = os.environ | {"DDPCORE_CUDA": "0"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (tarball,) = (tmp_path / "made").iterdir()
    with tarfile.open(tarball) as archive:
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert not sources - held
    assert not [name for name in held if name.endswith((".so", ".pyc"))]
