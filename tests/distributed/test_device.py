"""Steps on a device: large tensors, streams, graphs, and synchronization with the host. The same tests for CPU and GPU.

On the CPU, contexts for streams, graphs and device allocations do nothing. More tests run on a GPU: those with a
``device`` in ``tests/ops`` and ``tests/optim``, ``test_device_ranks.py``, and ``tests/cpp/test_cuda_*.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from ddpcore import ops
from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD
from ddpcore.parameters.flat import FlatParameters

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(FusedSGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": partial(FusedAdamW, weight_decay=0.01),
    "lars": partial(FusedLARS, momentum=0.9, weight_decay=0.01, max_grad_norm=1.0),
    "lamb": partial(FusedLAMB, weight_decay=0.01),
}
SIZES = [(1,), (3, 5), (4097,), (70, 71)]
WARM_UP, NUM_STEPS = 3, 5
PERIOD = 4099
NUM_PERIODS = {"cpu": 3, "cuda": 523_905}  # more than 2^31 elements in all
only_cuda = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
every_kind = pytest.mark.parametrize("kind", KINDS)


def new_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Work inside runs on a stream that waits for no other stream."""
    if device.type == "cpu":
        return nullcontext()
    torch.cuda.synchronize()
    return torch.cuda.stream(torch.cuda.Stream())


def captured(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Replays one graph that contains the whole step."""
    if device.type == "cpu":
        return step
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """An operation that makes the host wait for the device raises an error."""
    before = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else None
    if before is not None:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if before is not None:
            torch.cuda.set_sync_debug_mode(before)


class Problem:
    """Weights and a loss whose gradients have the same bits in every library: products of elements, without sums."""

    def __init__(self, kind: str, device: torch.device, way: str = "list", dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(size, generator=generator) for size in SIZES]
        self.factors = [torch.randn(size, generator=generator).to(device, dtype) for size in SIZES]
        self.params = [Parameter(weight.to(device, dtype)) for weight in weights]
        self.lr = torch.tensor(0.1, device=device)
        self.optimizer = KINDS[kind](self.params, lr=self.lr)
        if way == "flat":
            self.flat = FlatParameters([((str(index), param) for index, param in enumerate(self.params))])
            self.optimizer.bind(self.flat)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        pairs = zip(self.params, self.factors, strict=True)
        torch.stack([(param * factor).square().sum() for param, factor in pairs]).sum().backward()
        self.optimizer.step()

    def bits(self) -> list[Tensor]:
        """Copies of weights and states."""
        states = [value for param in self.params for value in self.optimizer.state[param].values()]
        return [tensor.detach().clone() for tensor in [*self.params, *states] if isinstance(tensor, Tensor)]


def trained(kind: str, device: torch.device, way: str) -> list[Tensor]:
    """The end of a schedule of learning rates: on tensors, on a flat buffer, or by a graph that was captured once."""
    problem = Problem(kind, device, way)
    with new_stream(device):
        for _ in range(WARM_UP):
            problem.step()
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the next steps run on another stream
    step = captured(problem.step, device) if way == "graph" else problem.step
    for number in range(NUM_STEPS):
        problem.lr.fill_(0.1 / (1 + number))
        step()
    return problem.bits()


@every_kind
def test_list_flat_buffer_graph_and_a_second_run_have_the_same_bits(kind, device, assert_same_bits):
    """The graph is captured at one learning rate and replayed at others, and its step counts continue."""
    ends = {way: trained(kind, device, way) for way in ("list", "flat", "graph", "again")}
    for way in ("flat", "graph", "again"):
        for index, (one, other) in enumerate(zip(ends[way], ends["list"], strict=True)):
            assert_same_bits(one.reshape(other.shape), other, f"{way}, tensor {index}")
    constant = Problem(kind, device)
    for _ in range(WARM_UP + NUM_STEPS):
        constant.step()
    assert not torch.equal(constant.bits()[2], ends["list"][2]), "the learning rate must have changed something"


@every_kind
def test_a_stream_of_ones_own(kind, device, assert_same_bits):
    """A step waits for earlier work of its own stream, and for no other stream."""
    problems = [Problem(kind, device) for _ in range(2)]
    gradients = [torch.randn(size).to(device) for size in SIZES]
    for problem, context in zip(problems, (nullcontext(), new_stream(device)), strict=True):
        for param in problem.params:
            param.grad = torch.zeros_like(param)
        with context:
            if device.type == "cuda":
                torch.cuda._sleep(100_000_000)  # cycles, about 50 ms: a step that does not wait comes first
            for param, gradient in zip(problem.params, gradients, strict=True):
                param.grad.copy_(gradient)
            problem.optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    for one, other in zip(*(problem.bits() for problem in problems), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_kind
def test_a_step_waits_for_nothing(kind, dtype, device, assert_same_bits):
    """Also under a gradient scaler, whose overflow must skip the step on the device."""
    problem = Problem(kind, device, dtype=dtype)
    problem.step()
    optimizer = problem.optimizer
    optimizer.grad_scale, optimizer.found_inf = torch.ones((), device=device), torch.zeros((), device=device)
    before = problem.bits()
    with no_waiting(device):
        optimizer.step()
    assert not all(map(torch.equal, problem.bits(), before))
    before = problem.bits()
    optimizer.found_inf.fill_(1.0)
    with no_waiting(device):
        optimizer.step()
    for one, other in zip(problem.bits(), before, strict=True):
        assert_same_bits(one, other, "what a skipped step left alone")


@only_cuda
@every_kind
def test_later_steps_allocate_nothing(kind, device):
    """``tests/optim/test_steady_state.py`` tests the same on the CPU."""
    problem = Problem(kind, device)
    problem.step()
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    problem.optimizer.step()
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before


# --- more than 2^31 elements -------------------------------------------------------------------------------------


def repeated(device: torch.device, seed: int) -> Tensor:
    """The same PERIOD numbers, repeated."""
    base = torch.randn(PERIOD, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)
    return base.repeat(NUM_PERIODS[device.type])


def assert_repeated(tensor: Tensor, expected: Tensor | None = None) -> None:
    """All periods are equal, and the first is as expected."""
    rows = tensor.detach().view(-1, PERIOD)
    assert (rows == rows[0]).all(), "a period differs from the first"
    assert expected is None or torch.equal(rows[0], expected)


@every_kind
def test_optimizers_of_very_long_tensors(kind, device):
    param, grad = Parameter(repeated(device, 0)), repeated(device, 1)
    param.grad = grad
    lr = 100.0 if kind == "lars" else 0.1  # the norm of 2^31 elements makes smaller steps vanish in bfloat16
    KINDS[kind]([param], lr=lr).step()
    short = Parameter(repeated(device, 0)[:PERIOD].clone())
    short.grad = grad[:PERIOD].clone()
    KINDS[kind]([short], lr=lr).step()
    assert_repeated(param, short.detach() if kind == "sgd" else None)  # the norms of lars and lamb depend on the length
    assert not torch.equal(param.detach()[:PERIOD], repeated(device, 0)[:PERIOD])


def test_averages_of_very_long_tensors(device):
    ends = []
    for length in (PERIOD, None):
        weights, peer, grad, buffer = (repeated(device, seed)[:length].clone() for seed in range(4))
        distances = ops.mix_(weights, [peer], 0.5, [0.5])
        mixture = ops.Mixture([peer], 0.75, [0.25])
        ops.sgd_step_([weights], [grad], [buffer], mixture=mixture, offsets=[0], lr=0.1, momentum=0.9)
        ends.append((weights, buffer, distances))
    (short, short_buffer, short_distance), (long, long_buffer, distance) = ends
    assert_repeated(long, short)
    assert_repeated(long_buffer, short_buffer)
    torch.testing.assert_close(distance, short_distance * NUM_PERIODS[device.type], rtol=1e-9, atol=0)


def test_sums_of_very_long_tensors(device):
    rows = [repeated(device, seed) for seed in range(2)]
    short = torch.stack([row[:PERIOD].double() for row in rows])
    sums = ops.noise_sums(rows, [0, len(rows[0])])
    torch.testing.assert_close(sums[0], short @ short.T * NUM_PERIODS[device.type], rtol=1e-9, atol=1e-6)
    squares = short.square().sum(dim=1) * NUM_PERIODS[device.type]
    torch.testing.assert_close(ops.segment_norms(rows), squares, rtol=1e-9, atol=0)
