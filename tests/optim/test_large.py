"""Tensors larger than caches, than a thread's share, and than 2^32 elements."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpcore.optim import FusedLAMB, FusedLARS, FusedSGD

pytestmark = pytest.mark.slow

MILLIONS = 2_500_003  # 10 MB: no cache of a core holds it; no multiple of a vector, a block or a tile
STEPS = 2
TOLERANCE = 8 * 2**-23 * 8  # eight units in the last place of weights below 8
MORE_THAN_32_BITS = 2**31 + 4097
CHUNK = 2**21  # bytes, which a core's cache holds
LARGE_BYTES = 2**28  # page tables of weights, gradients and two states, and four chunks of each


def free_bytes() -> int:
    """The memory that is available without swapping, or that of the free pages if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def zeros_in_few_pages(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose chunks, but the first and the last two, are one chunk of memory: what writes zeros needs no more.

    Each number in them is also in :func:`in_memory`.
    """
    num_bytes = dtype.itemsize * numel
    total = -(-num_bytes // CHUNK) * CHUNK
    place, free = ctypes.CDLL(None).mmap, ctypes.CDLL(None).munmap
    free.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    place.restype = ctypes.c_void_p
    place.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    both, unreserved, fixed = mmap.PROT_READ | mmap.PROT_WRITE, 0x4000, 0x10
    first = place(None, total, both, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved, -1, 0)
    file = os.memfd_create("zeros")
    os.ftruncate(file, CHUNK)
    for start in range(CHUNK, total - 2 * CHUNK, CHUNK):
        assert place(first + start, CHUNK, both, mmap.MAP_SHARED | fixed, file, 0) == first + start
    os.close(file)
    memory = (ctypes.c_char * num_bytes).from_address(first)
    weakref.finalize(memory, free, first, total)
    return torch.frombuffer(memory, dtype=dtype)


def in_memory(zeros: torch.Tensor) -> torch.Tensor:
    """The numbers of the chunks that are different memory: the first two, and the last two."""
    size = CHUNK // zeros.itemsize
    last = (zeros.numel() - 1) // size * size
    return torch.cat([zeros[: 2 * size], zeros[last - size :]])


def large_parameter() -> nn.Parameter:
    """Weights (1, 0, ..., 0, 3) of bf16 whose gradient is zero except for its last element."""
    if free_bytes() < LARGE_BYTES:
        pytest.skip(f"{LARGE_BYTES / 1e9:.0f} GB of memory are not free")
    param = nn.Parameter(zeros_in_few_pages(MORE_THAN_32_BITS, torch.bfloat16))
    param.grad = zeros_in_few_pages(MORE_THAN_32_BITS, torch.bfloat16)
    with torch.no_grad():
        param[0], param[-1], param.grad[-1] = 1.0, 3.0, 4.0
    return param


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="many chunks in one chunk of memory need Linux' mmap")


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def weights_and_gradients() -> tuple[nn.Parameter, list[torch.Tensor]]:
    return nn.Parameter(torch.randn(MILLIONS)), [torch.randn(MILLIONS) for _ in range(STEPS)]


def step(optimizer: torch.optim.Optimizer, param: nn.Parameter, grads: list[torch.Tensor]) -> None:
    for grad in grads:
        param.grad = grad
        optimizer.step()


def assert_close(param: nn.Parameter, exact: torch.Tensor) -> None:
    assert (param.detach().double() - exact).abs().max() <= TOLERANCE


def test_millions_of_elements_of_sgd(two_threads):
    param, grads = weights_and_gradients()
    exact, momentum = param.detach().double(), 0.0
    step(FusedSGD([param], lr=0.1, momentum=0.9, weight_decay=0.05), param, grads)
    for grad in grads:
        momentum = 0.9 * momentum + grad.double() + 0.05 * exact
        exact = exact - 0.1 * momentum
    assert_close(param, exact)


def test_millions_of_elements_of_lars(two_threads):
    param, grads = weights_and_gradients()
    exact, momentum = param.detach().double(), 0.0
    step(FusedLARS([param], lr=0.1, weight_decay=0.05, trust_coefficient=3.0), param, grads)
    for grad in grads:
        ratio = 3.0 * exact.norm() / (grad.double().norm() + 0.05 * exact.norm() + 1e-8)
        momentum = 0.9 * momentum + 0.1 * ratio * (grad.double() + 0.05 * exact)
        exact = exact - momentum
    assert_close(param, exact)


def test_millions_of_elements_of_lamb(two_threads):
    param, grads = weights_and_gradients()
    exact, first, second = param.detach().double(), 0.0, 0.0
    step(FusedLAMB([param], lr=0.1, weight_decay=0.05), param, grads)
    for t, grad in enumerate(grads, start=1):
        first = 0.9 * first + 0.1 * grad.double()
        second = 0.999 * second + 0.001 * grad.double().square()
        update = first / (1 - 0.9**t) / ((second / (1 - 0.999**t)).sqrt() + 1e-6) + 0.05 * exact
        exact = exact - 0.1 * exact.norm() / update.norm() * update
    assert_close(param, exact)


@on_linux
@pytest.mark.parametrize("make", [FusedSGD, FusedLARS])
def test_more_elements_than_32_bits_count(make, two_threads):
    param = large_parameter()
    if make is FusedSGD:
        moved = 3.0 - 0.5 * 4.0
        optimizer = FusedSGD([param], lr=0.5)
    else:
        ratio = 0.5 * math.sqrt(10.0) / 4.0
        moved = 3.0 - ratio * 4.0
        optimizer = FusedLARS([param], lr=1.0, momentum=0.0, trust_coefficient=0.5, eps=0.0)
    optimizer.step()
    assert (param[0].item(), param[-1].item()) == (1.0, pytest.approx(moved, rel=2**-8))
    assert in_memory(param.detach()).count_nonzero() == 2, "nothing else has moved"
    if make is FusedLARS:
        assert optimizer.trust_ratios()[0][-3:] == pytest.approx((ratio, math.sqrt(10.0), 4.0))


@on_linux
def test_more_elements_than_32_bits_count_in_lamb(two_threads):
    param = large_parameter()
    optimizer = FusedLAMB([param], lr=0.5)
    first, second = (zeros_in_few_pages(MORE_THAN_32_BITS, torch.float32) for _ in range(2))
    optimizer.state[param] = {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}
    optimizer.step()
    assert optimizer.state[param]["exp_avg"].data_ptr() == first.data_ptr()
    assert optimizer.trust_ratios()[0] == pytest.approx((math.sqrt(10.0), math.sqrt(10.0), 1.0), rel=1e-5)
    assert (param[0].item(), param[-1].item()) == (1.0, pytest.approx(3.0 - 0.5 * math.sqrt(10.0), rel=2**-8))
    assert (first[-1].item(), second[-1].item()) == pytest.approx((0.1 * 4.0, 0.001 * 16.0))
    assert [in_memory(one).count_nonzero() for one in (param.detach(), first, second)] == [2, 1, 1]
