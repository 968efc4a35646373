"""Shared by all tests: the device, a seed, and what it means that two results are equal."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

# Before torch and numpy are loaded: threads that wait for each other sleep, and those of numpy and scipy, which cannot,
# are not made. Else, where tests share cores, one spins for the time in which the other cannot run: 35 times the CPU
# time of small training steps on two busy cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell starts what it runs in the background deaf to Ctrl-C, and so would be every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch
from torch import Tensor

import ddpcore.ops  # noqa: F401  registers the operators
from ddpcore.runtime import launch
from helpers import forked, heavy, seeds

Randn = Callable[..., Tensor]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # once, not in each process of pytest-xdist
        config.pluginmanager.register(_FailuresAtOnce(config), "failures-at-once")


class _FailuresAtOnce:
    """Prints a failed test when it fails: a run that is cut off never comes to its list of failures."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = report.longreprtext if crash is None else crash.message
            reporter.write_line(f"\nFAILED in {report.when} of {report.nodeid}: {why.strip()[:300]}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the collector of garbage, of which there is none here: it takes two fifths of the time.

    Later collections leave out what was made here. Each would take half a second for it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Heavy files first, because one that begins last ends alone. Without a GPU tests on one are left out."""
    items[:] = heavy.first(items)
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("cuda")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("cuda")]


def _why_no_cuda() -> str | None:
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("ddpcore::mix_", "CUDA"):
        return "there is a CUDA device, but ddpcore was built without its CUDA kernels"
    return None


# The parameters of a test that runs once on each device; without a GPU no test on one is collected.
DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else [])]


LAUNCHED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@pytest.fixture(autouse=True)
def no_launcher() -> Iterator[None]:
    """Trainers set the variables of a launcher in their process, and later tests would start as if torchrun had."""
    before = {name: os.environ.get(name) for name in LAUNCHED}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def forked_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that ``launch`` starts from this process are forked, without the seconds of an import each."""
    (tmp_path / "ranks").mkdir()
    monkeypatch.setattr(launch, "multiprocessing", forked.Ranks(tmp_path / "ranks"))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device of this machine; a test that takes it runs once on each."""
    if request.param == "cuda" and (reason := _why_no_cuda()) is not None:
        pytest.skip(reason)
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers for a test alone and in any order."""
    seeds.seed()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for all tests of a file, as ranks have: sums in several threads can have other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """``torch.set_num_threads``, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def randn(device: torch.device) -> Randn:
    """Normal numbers as a view that starts ``offset`` elements into a larger buffer, so that it may be misaligned.

    Drawn on the CPU: the same numbers on every device.
    """

    def make(numel: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> Tensor:
        base = torch.randn(numel + offset + 8).to(dtype).to(device)
        return base[offset : offset + numel]

    return make


@pytest.fixture
def assert_same_bits() -> Callable[..., None]:
    """Every element has the same bits, the sign of zero included. A NaN is a NaN, whatever its payload."""

    def check(actual: Tensor, expected: Tensor, what: str = "result") -> None:
        actual, expected = actual.detach().cpu(), expected.detach().cpu()
        assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} is not {expected.dtype}"
        assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
        kind = BITS[actual.element_size()]
        same = actual.contiguous().view(kind) == expected.contiguous().view(kind)
        wrong = (~(same | (actual.isnan() & expected.isnan()))).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            raise AssertionError(
                f"{what}: {len(wrong)} of {actual.numel()} elements differ, first at {at}: "
                f"{actual[at].item()!r} is not {expected[at].item()!r}"
            )

    return check


@pytest.fixture
def assert_near() -> Callable[..., None]:
    """Within the rounding errors of fp32 arithmetic and of ``num_stores`` roundings to the storage type.

    ``magnitude`` is the sum of the absolute values of the terms of each element. Each of ``num_roundings`` (operations
    in fp32, and constants rounded to fp32) adds at most half an epsilon of it, counted as one; each store adds half an
    epsilon of the storage type, or half its smallest subnormal.
    """

    def check(actual: Tensor, exact: Tensor, magnitude: Tensor, num_roundings: int, num_stores: int = 1) -> None:
        actual, exact, magnitude = actual.detach().cpu(), exact.detach().cpu(), magnitude.detach().cpu()
        assert exact.dtype == torch.float64 and actual.shape == exact.shape
        info = torch.finfo(actual.dtype)
        relative = num_roundings * torch.finfo(torch.float32).eps + num_stores * info.eps / 2 * 1.01
        bound = relative * magnitude.double() + num_stores * info.smallest_normal * info.eps
        excess = (actual.double() - exact).abs() - bound
        assert not actual.isnan().any()
        assert (excess <= 0).all(), f"the error exceeds its bound by up to {excess.max().item():.3e}"

    return check
