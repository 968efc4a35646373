"""Without the compiled library: one warning that says what to do, and all operators run on their references."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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


def calls(leaf: Tensor, plain: Tensor, written: Tensor) -> dict[str, tuple[Callable[[], Any], bool]]:
    """Every operator with a tensor that needs a gradient, and whether it writes into ``written``."""
    offsets, columns, values = torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([0.5])
    step = [written], [plain], [plain.clone()]
    sums, ones = torch.zeros(9, dtype=torch.float64), [torch.zeros(1)]
    norms = {"scratch": torch.zeros(9, dtype=torch.float64), "trust": torch.zeros(1, 3, dtype=torch.float64)}
    return {
        "segment_norms": (lambda: ops.segment_norms([leaf]), False),
        "noise_sums": (lambda: ops.noise_sums([plain, leaf], [0, 5]), False),
        "noise_sums of an origin": (lambda: ops.noise_sums([plain], [0, 5], leaf), False),
        "total_norm_": (lambda: ops.total_norm_([leaf], sums), False),
        "mix_": (lambda: ops.mix_(written, [leaf], 0.5, [0.5]), True),
        "mix_ into out": (lambda: ops.mix_(plain, [leaf], 0.5, [0.5], out=written), True),
        "mix_stacked_": (lambda: ops.mix_stacked_(written[None], [leaf], offsets, columns, values), True),
        "average_": (lambda: ops.average_([written, plain], 2), True),
        "sgd_step_": (lambda: ops.sgd_step_(*step, [], [], lr=0.1), True),
        "adamw_step_": (lambda: ops.adamw_step_(*step, [plain], [], ones, norms["scratch"], lr=0.1), True),
        "lars_step_": (lambda: ops.lars_step_(*step, [], ones, **norms, lr=0.1, adapt=[1]), True),
        "lamb_step_": (lambda: ops.lamb_step_(*step, [plain], [], ones, **norms, lr=0.1, adapt=[1]), True),
    }


def test_operators_have_no_derivative_and_say_so():
    """A backward pass through a result is an error, and so is a call that would be a part of a graph."""
    for name in calls(*torch.ones(3, 5)):
        leaf, plain, written = torch.ones(5, requires_grad=True), torch.ones(5), torch.ones(5)
        call, writes = calls(leaf, plain, written)[name]
        weight = torch.ones(5, requires_grad=True)
        graph = (weight * written).sum()
        result = call()
        if result is not None and result.requires_grad:
            with pytest.raises(RuntimeError, match=r"(norms|sums|_) has no derivative: pass detached tensors, or"):
                (weight.sum() + result.sum()).backward()
        assert result is None or result.requires_grad == ("average" not in name), name
        with torch.no_grad():
            assert result is None or not call().requires_grad
        if not writes:
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            graph.backward()
        of_graph = weight * 2
        call, _ = calls(leaf, plain, of_graph)[name]
        with pytest.raises(RuntimeError, match="_ overwrites a result of a graph and has no derivative"):
            call()
        assert torch.equal(of_graph, torch.full((5,), 2.0))
        with torch.no_grad():
            call()


def test_operators_refuse_torchs_mode_that_keeps_saved_tensors() -> None:
    """It copies a saved tensor before an operation of torch writes into it, and does not see what a kernel writes."""
    model = torch.nn.Linear(2, 2)
    optimizer = ddpcore.optim.FusedAdamW(model.parameters(), lr=0.1)
    weights = torch.ones(4)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        model(torch.ones(2)).sum().backward()
        for call in (optimizer.step, lambda: ops.mix_(weights, [torch.zeros(4)], 0.5, [0.5])):
            with pytest.raises(RuntimeError, match="inside torch's allow_mutation_on_saved_tensors"):
                call()
    assert torch.equal(weights, torch.ones(4))
