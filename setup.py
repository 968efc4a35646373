"""Builds the compiled library, ddpcore/_ops.abi3.so. It uses the stable ABI of torch and nothing of Python.

So one wheel serves Python 3.10 and newer with torch 2.10 and newer.

DDPCORE_CUDA=0|1 overrides the choice whether the CUDA kernels are built; by default they are where a CUDA toolkit and a
CUDA build of torch exist. TORCH_CUDA_ARCH_LIST is torch's own variable and holds here too; without it
they are compiled for the GPUs of this machine, or for all where there is none. DDPCORE_LOCAL_VERSION=cu13 makes a wheel
for CUDA 13 with this suffix of its version.

DDPCORE_PREBUILT=1 compiles nothing: make install takes the library that setup.py build_ext --inplace has made.

DDPCORE_SANITIZE=address,undefined|thread compiles the CPU kernels with these sanitizers, for tools/check_sanitizers.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info

# In an isolated build the torch of the environment that ddpcore is built for is not on the path. The operator library
# uses torch's ABI-stable interface, so that torch serves, and pip need not fetch a second one.
if importlib.util.find_spec("torch") is None:
    sys.path.append(sysconfig.get_paths()["purelib"])
try:
    import torch
    from torch.utils import cpp_extension
except ImportError:
    torch = None

CSRC = Path("csrc")
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # torch 2.10
# No contraction and no errno: the same bits on every instruction set, and square roots that vectorise.
CXX_FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",  # Python's own flags ask for debug information, which is most of the library
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    f"-ffile-prefix-map={Path.cwd()}/=",  # error messages name the file, not the machine that compiled it
    STABLE_ABI,
]
LINK_FLAGS = ["-Wl,-s"]  # no symbols but those that the dynamic linker needs
SANITIZE = os.environ.get("DDPCORE_SANITIZE")
if SANITIZE:  # without clones (csrc/cpu/dispatch.h): they are resolved before a sanitizer is ready
    CXX_FLAGS += ["-O1", "-g1", "-fno-omit-frame-pointer", "-U__gnu_linux__", f"-fsanitize={SANITIZE}"]
    CXX_FLAGS += ["-fno-sanitize-recover=all"]
    LINK_FLAGS = [f"-fsanitize={SANITIZE}"]
NAMED = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
EVERY_ARCHITECTURE = "7.5;8.0;9.0+PTX"  # newer ones compile the PTX when they load it
NVCC_FLAGS = ["-std=c++20", "-O3", "-fmad=false", STABLE_ABI]


def fail(message):
    raise SystemExit(f"ddpcore: {message}")


def builds_cuda():
    wish = os.environ.get("DDPCORE_CUDA", "")
    if wish not in ("", "0", "1"):
        fail(f"DDPCORE_CUDA={wish!r} is not 0 or 1")
    # torch's own CUDA_HOME is None under a CPU build of torch, whatever is installed.
    toolkit = bool(cpp_extension.CUDA_HOME or NAMED or shutil.which("nvcc"))
    if wish == "1" and not toolkit:
        fail("DDPCORE_CUDA=1 but no CUDA toolkit was found: install one, or set CUDA_HOME to it")
    wanted = os.environ.get("DDPCORE_LOCAL_VERSION", "").removeprefix("cu")
    if wanted and (torch.version.cuda or "").partition(".")[0] != wanted:
        fail(f"a wheel for CUDA {wanted} needs a torch built for it: torch {torch.__version__} is not, set PYTHON")
    if wish == "1" and torch.version.cuda is None:
        fail(f"DDPCORE_CUDA=1 but torch {torch.__version__} is built without CUDA: install a CUDA build of torch")
    return wish == "1" or (wish == "" and toolkit and torch.version.cuda is not None)


def toolkits():
    """Folders that may be the CUDA toolkit, the likeliest first. nvcc names its own, because a script may call it."""
    yield NAMED
    if nvcc := shutil.which("nvcc"):
        said = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
        yield from re.findall(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
        yield from (str(Path(path).parent.parent) for path in (nvcc, os.path.realpath(nvcc)))
    yield cpp_extension.CUDA_HOME
    yield from map(str, Path(sysconfig.get_paths()["purelib"]).glob("nvidia/cu*"))  # nvcc and headers from PyPI


def find_toolkit():
    """Let torch compile with a toolkit that has a compiler and headers. Fails if CUDA_HOME names another folder."""
    needed = ("bin/nvcc", "include/cuda_runtime.h")
    folders = [os.path.realpath(folder) for folder in toolkits() if folder]
    whole = [folder for folder in folders if all(Path(folder, name).is_file() for name in needed)]
    if not whole or (NAMED and whole[0] != os.path.realpath(NAMED)):
        right = whole[0] if whole else "the folder that has both, or DDPCORE_CUDA=0"
        fail(f"{NAMED or folders[0]} has no {' or no '.join(needed)}: set CUDA_HOME={right}")
    os.environ["CUDA_HOME"] = cpp_extension.CUDA_HOME = whole[0]


def choose_architectures():
    """torch compiles for the GPUs that it sees; a machine without one, where images are made, builds for all."""
    if not os.environ.get("TORCH_CUDA_ARCH_LIST") and torch.cuda.device_count() == 0:
        os.environ["TORCH_CUDA_ARCH_LIST"] = EVERY_ARCHITECTURE


def sources(*patterns):
    return sorted(str(path) for pattern in patterns for path in CSRC.glob(pattern))


def extensions():
    if os.environ.get("DDPCORE_PREBUILT") == "1":
        return []
    if torch is None:  # pip asks for the metadata before it builds; the build itself says what is missing
        from setuptools import Extension

        return [Extension("ddpcore._ops", sources("bindings/flags.cpp"), py_limited_api=True)]
    cuda = builds_cuda()
    files = sources("bindings/cpu.cpp", "bindings/flags.cpp", "cpu/*.cpp")
    if cuda:
        find_toolkit()
        choose_architectures()
        files += sources("bindings/cuda.cpp", "cuda/*.cu")
    extension = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension
    operators = extension(
        "ddpcore._ops",
        files,
        extra_compile_args={"cxx": CXX_FLAGS + (["-DUSE_CUDA"] if cuda else []), "nvcc": NVCC_FLAGS},
        extra_link_args=LINK_FLAGS,
        py_limited_api=True,
    )
    return [operators]


class Build(cpp_extension.BuildExtension if torch else build_ext):
    def run(self):
        if torch is None:
            fail("building needs torch >= 2.10 in this environment: install torch first (pip install torch)")
        if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
            fail(f"torch {torch.__version__} is too old: install torch >= 2.10")
        super().run()


class EggInfo(egg_info):
    def finalize_options(self):
        local_version = os.environ.get("DDPCORE_LOCAL_VERSION")
        if local_version:  # set here, because the setup.cfg of a source distribution would replace an option of setup()
            self.tag_build = f"+{local_version}"
        super().finalize_options()


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": Build, "egg_info": EggInfo},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
