"""Builds the wheels of a release into dist/, from the source distribution there.

    tools/wheels.py                 the plain wheel, with kernels for the CPU
    tools/wheels.py 12 13           also the wheels VERSION+cu12 and VERSION+cu13, with kernels for CUDA too

dist/ is an index for pip, and the user chooses: no wheel looks for a GPU.

    pip install --find-links dist ddpcore===VERSION           the plain one: pip takes == for any of the three
    pip install --find-links dist ddpcore==VERSION+cu13

A wheel for CUDA N needs a torch that is built for CUDA N: that of this Python, or one that is installed into
build/wheels/cuN (gigabytes). It needs the nvcc of CUDA N: CUDA_HOME, /usr/local/cuda-N.*, or the compiler packages of
PyPI. PyPI has these for CUDA 13. Its nvidia-cuda-nvcc-cu12 has ptxas and no nvcc, so CUDA 12 needs a toolkit.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = {"12": "torch==2.10.0", "13": "torch==2.12.1"}  # the versions on PyPI that are built for each CUDA
NEEDED = ("setuptools>=77", "wheel", "ninja", "numpy")
COMPILER = {
    "13": [f"nvidia-{name}==13.0.*" for name in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl", "cuda-runtime")],
}


def output(*words: object, **variables: str) -> str:
    """The standard output of a command. SystemExit if it fails."""
    command = [*map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"wheels: this failed: {' '.join(command)}")
    return done.stdout.strip()


def python_for(cuda: str) -> str:
    """A Python whose torch is built for this CUDA."""
    ask = "import torch; print(torch.version.cuda)"
    if output(sys.executable, "-c", ask).startswith(f"{cuda}."):
        return sys.executable
    folder = ROOT / "build" / "wheels" / f"cu{cuda}"
    python = folder / "bin" / "python"
    if not python.exists():
        output(sys.executable, "-m", "venv", folder)
    output(python, "-m", "pip", "install", "-q", TORCH[cuda], *NEEDED)
    found = output(python, "-c", ask)
    if not found.startswith(f"{cuda}."):
        raise SystemExit(
            f"wheels: {TORCH[cuda]} is built for CUDA {found}: install a torch for CUDA {cuda} into {folder}"
        )
    return str(python)


def toolkit_of(cuda: str) -> str | None:
    """The folder of the installed toolkit of this CUDA; None if PyPI has its compiler. SystemExit if there is none."""
    folders = [os.environ.get("CUDA_HOME"), *sorted(map(str, Path("/usr/local").glob(f"cuda-{cuda}*")), reverse=True)]
    for folder in folders:
        if folder and Path(folder, "bin", "nvcc").is_file():
            said = output(Path(folder, "bin", "nvcc"), "--version")
            if re.search(rf"release {cuda}\.", said):
                return folder
    if cuda not in COMPILER:
        raise SystemExit(
            f"wheels: no nvcc of CUDA {cuda}, and PyPI has none (nvidia-cuda-nvcc-cu{cuda} has ptxas alone): install "
            f"the toolkit of CUDA {cuda} and set CUDA_HOME to its folder"
        )
    return None


def compiler_from_pypi(cuda: str, python: str) -> str:
    """Install the compiler packages of this CUDA beside its torch, and return their folder."""
    output(python, "-m", "pip", "install", "-q", *COMPILER[cuda])
    home = output(python, "-c", f"import sysconfig; print(sysconfig.get_paths()['purelib'] + '/nvidia/cu{cuda}')")
    link = Path(home, "lib", "libcudart.so")
    if Path(f"{link}.{cuda}").exists() and not link.exists():
        link.symlink_to(f"libcudart.so.{cuda}")  # the packages have no name for the linker
    return home


def build(source: Path, cuda: str | None, home: str | None) -> Path:
    """Build one wheel into dist/ with the toolkit in a folder, and return its path."""
    python, variables = sys.executable, {"DDPCORE_CUDA": "0", "DDPCORE_LOCAL_VERSION": ""}
    if cuda is not None:
        python = python_for(cuda)
        home = home or compiler_from_pypi(cuda, python)
        variables = {"DDPCORE_CUDA": "1", "DDPCORE_LOCAL_VERSION": f"cu{cuda}", "CUDA_HOME": home}
    for old in wheels(cuda):
        old.unlink()
    words = ("--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", ROOT / "dist", source)
    output(python, "-m", "pip", "wheel", "-q", *words, **variables)
    return wheels(cuda)[0]


def wheels(cuda: str | None) -> list[Path]:
    """The plain wheels in dist/, or those for a CUDA."""
    found = sorted((ROOT / "dist").glob("*.whl"))
    return [path for path in found if (f"+cu{cuda}-" in path.name if cuda else "+" not in path.name)]


def main() -> None:
    """Build the plain wheel and those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cuda", nargs="*", help="versions of CUDA: 12, 13")
    options = parser.parse_args()
    if unknown := sorted(set(options.cuda) - set(TORCH)):
        raise SystemExit(f"wheels: CUDA {', '.join(unknown)} is not known: take 12 or 13")
    sources = sorted((ROOT / "dist").glob("*.tar.gz"))
    if len(sources) != 1:
        raise SystemExit("wheels: dist/ must hold one source distribution: run 'make sdist' first")
    homes = {cuda: toolkit_of(cuda) if cuda else None for cuda in (None, *options.cuda)}  # fails before it builds
    for cuda, home in homes.items():
        wheel = build(sources[0], cuda, home)
        print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 2**20:.1f} MB", flush=True)
    version = sources[0].name.removeprefix("ddpcore-").removesuffix(".tar.gz")
    print(f"pip install --find-links dist ddpcore==={version}")
    for cuda in options.cuda:
        print(f"pip install --find-links dist ddpcore=={version}+cu{cuda}")


if __name__ == "__main__":
    main()
