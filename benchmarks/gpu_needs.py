"""Checks what the steps of ``run_gpu.sh`` need before any of them starts.

Prints one line for the script: the number of GPUs, the architecture of the first one, the folder of compiled objects
for this interpreter, the path of nvcc, and the optional modules that are not installed. If something required is
missing, prints all that is missing and ends with exit code 2.
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
TO_BUILD = ("setuptools",)
TO_TEST = ("pytest", "xdist", "hypothesis", "networkx")


def absent(modules: Iterable[str]) -> list[str]:
    """The modules that cannot be imported."""
    found = []
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            found.append(name)
    return found


def nvcc() -> str:
    """The path of CUDA's compiler, from PATH or from the toolkit's folder; empty if there is none."""
    beside = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin" / "nvcc"
    return shutil.which("nvcc") or shutil.which(str(beside)) or ""


def missing(device: str, builds: bool) -> list[str]:
    """Everything required that is missing."""
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
    parser.add_argument("--no-build", action="store_true", help="do not require what only the build needs")
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
    slow = [] if shutil.which("ninja") else ["ninja"]  # without it kernels are compiled one after the other
    print(num_gpus, architecture, objects, nvcc() or "-", *slow, *absent(TO_TEST))
    return 0


if __name__ == "__main__":
    sys.exit(main())
