"""Without the compiled library: one warning that says what to do, and all operators run on their references."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpcore
from ddpcore import ops
from ddpcore.runtime.machine import machine
from helpers import without_kernels

HELPERS = Path(__file__).parent.parent / "helpers"


def copy_of_the_package(folder: Path) -> Path:
    """A copy of the package without compiled files."""
    source = Path(ddpcore.__file__).parent
    shutil.copytree(source, folder / "ddpcore", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process that can import the package from ``folder`` and the tests' helpers."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(HELPERS.parent)]),
        "PYTHONWARNINGS": "default",
    }
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True, timeout=900
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of a process without the library."""
    folder = copy_of_the_package(tmp_path_factory.mktemp("alone"))
    done = python(folder, "-m", "helpers.without_kernels", "result.pt")
    assert done.returncode == 0, done.stderr
    seen = torch.load(folder / "result.pt")
    assert seen["package"] == str(folder / "ddpcore" / "__init__.py")
    return seen


@pytest.fixture
def compiled(set_threads: Any) -> dict[str, Any]:
    """The results of the same operators in this process, with the library."""
    assert ops.WHY_NOT_COMPILED is None
    set_threads(1)
    return without_kernels.results()


@pytest.mark.slow
def test_importing_warns_once_in_one_line(alone):
    assert len(alone["warned"]) == 1, alone["warned"]
    category, message = alone["warned"][0]
    assert category == "RuntimeWarning" and "\n" not in message
    assert "is not built in" in message and "run 'pip install -e .' or 'make build'" in message
    assert "plain torch operations" in message
    assert message.startswith(alone["why"])


@pytest.mark.slow
def test_every_operator_has_the_same_results(alone, compiled, assert_same_bits):
    """Bitwise, except for float64 sums, which are added in another order."""
    assert alone["results"].keys() == compiled.keys()
    for name, tensor in compiled.items():
        other = alone["results"][name]
        if tensor.dtype == torch.float64:
            torch.testing.assert_close(other, tensor, rtol=1e-12, atol=0.0, equal_nan=True, msg=name)
        else:
            assert_same_bits(other, tensor, name)


@pytest.mark.slow
def test_every_record_says_whose_kernels_are_compiled(alone):
    """Otherwise benchmarks would report reference implementations as kernels."""
    assert alone["kernels"] == []
    assert "cpu" in machine("cpu")["kernels"]


@pytest.mark.slow
def test_a_leaf_that_needs_a_gradient_is_stepped(alone):
    assert alone["leaf"].tolist() == [0.5] * 3


@pytest.mark.slow
def test_every_optimizer_trains(alone):
    for name, losses in alone["losses"].items():
        assert losses[-1] < 0.9 * losses[0], f"{name}: {losses[0]} to {losses[-1]}"
        kind, _, dtype_name = name.partition(" ")
        dtype = getattr(torch, dtype_name.removeprefix("torch."))
        here = without_kernels.train(kind, dtype)
        # A trust ratio may round to another fp32 number: one rounding error in each of 20 steps.
        assert here == pytest.approx(losses, rel=20 * torch.finfo(dtype).eps), name


@pytest.mark.slow
def test_distribute_needs_no_compiled_library(alone, set_threads, assert_same_bits):
    set_threads(1)
    for actual, expected in zip(alone["distributed"], without_kernels.distributed(), strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.slow
def test_a_library_that_cannot_be_loaded_is_named(tmp_path):
    folder = copy_of_the_package(tmp_path)
    (folder / "ddpcore" / "_ops.abi3.so").write_bytes(b"no library")
    done = python(folder, "-c", "import ddpcore.ops; print(ddpcore.ops.WHY_NOT_COMPILED)")
    assert done.returncode == 0, done.stderr
    assert f"torch {torch.__version__} cannot load {folder / 'ddpcore' / '_ops.abi3.so'}: " in done.stdout
    assert done.stdout.rstrip().endswith("; rebuild it or take another wheel") and done.stdout.count("\n") == 1
    assert done.stderr.count("RuntimeWarning") == 1
