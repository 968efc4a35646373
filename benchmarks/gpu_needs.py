"""What the steps of ``run_gpu.sh`` need, looked at before any of them takes time.

Prints one line for the script: how many GPUs, the architecture of the first, the folder of this interpreter's objects,
nvcc, and what is not installed but can be done without. Or, with exit code 2, all that is missing and cannot.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

ALWAYS = ("torch", "numpy", "scipy", "rich", "safetensors")
TO_BUILD = ("setuptools", "pybind11")
TO_TEST = ("pytest", "xdist", "hypothesis", "networkx")


def absent(modules: Iterable[str]) -> list[str]:
    """Those that cannot be imported."""
    found = []
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            found.append(name)
    return found


def nvcc() -> str:
    """CUDA's compiler: on the path, or where the toolkit is; empty where it is not."""
    beside = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin" / "nvcc"
    return shutil.which("nvcc") or shutil.which(str(beside)) or ""


def missing(device: str, builds: bool) -> list[str]:
    """All without which nothing can be done."""
    found = absent(ALWAYS + (TO_BUILD if builds else ()))
    if builds and shutil.which("g++") is None:
        found.append("g++")
    if builds and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        found.append("Python.h")
    if builds and device == "cuda" and not nvcc():
        found.append("nvcc (set CUDA_HOME)")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--no-build", action="store_true", help="what only the build needs may be missing")
    options = parser.parse_args()
    lacks = missing(options.device, builds=not options.no_build)
    if lacks:
        print(f"{sys.executable} lacks {', '.join(lacks)}: install what is named, or set PYTHON to one that has it")
        return 2
    torch = importlib.import_module("torch")
    num_gpus, architecture = 2, "-"  # a dry run has two ranks
    if options.device == "cuda":
        if not torch.cuda.is_available():
            print("torch sees no GPU: use --dry-run to try the steps without one")
            return 2
        num_gpus, architecture = torch.cuda.device_count(), "{}.{}".format(*torch.cuda.get_device_capability())
    objects = f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    slow = [] if shutil.which("ninja") else ["ninja"]  # kernels are compiled one after the other without that program
    print(num_gpus, architecture, objects, nvcc() or "-", *slow, *absent(TO_TEST))
    return 0


if __name__ == "__main__":
    sys.exit(main())
