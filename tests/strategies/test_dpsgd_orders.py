"""The three orders, staleness and compression, against their equations in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore import Complete, FromMatrix, OnePeerExponential, RandomPair, Ring
from ddpcore.compression import BFloat16, Int8, TopK
from ddpcore.optim import FusedSGD
from ddpcore.strategies import DPSGD, ORDERS

ROLLED = FromMatrix(0.7 * np.eye(4) + 0.3 * np.roll(np.eye(4), 1, axis=0))
N = 4


class Quadratics:
    """One least-squares problem a learner, and gradients at any weights ``[n, 2, 4]``."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.inputs, self.targets = torch.randn(N, 6, 4), torch.randn(N, 6, 2)

    def loss(self, outputs: Tensor, rows: slice) -> Tensor:
        return (0.5 * (outputs - self.targets[:, rows]).square()).sum()

    def gradients(self, w: Tensor) -> Tensor:
        x, y = self.inputs.double(), self.targets.double()
        return torch.einsum("jbo,jbi->joi", torch.einsum("jbi,joi->jbo", x, w) - y, x)


def train(strategy: Any, make: Any, num_steps: int, accumulate: int = 1, start: Tensor | None = None) -> list[Tensor]:
    """Weights ``[n, 2, 4]`` before the first step and after each."""
    problem = Quadratics()
    model = nn.Linear(4, 2, bias=False)
    optimizer = make(model.parameters())
    handle = ddpcore.distribute(model, optimizer, strategy, learners=N, vectorize=False)
    if start is not None:
        with torch.no_grad():
            model.weight.copy_(start)
    seen = [model.weight.detach().clone()]
    for _ in range(num_steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            rows = slice(part * 6 // accumulate, (part + 1) * 6 // accumulate)
            problem.loss(handle.model(problem.inputs[:, rows]), rows).backward()
        optimizer.step()
        seen.append(model.weight.detach().clone())
    return seen


def mix(matrix: Any, w: Tensor) -> Tensor:
    return torch.einsum("jk,koi->joi", torch.as_tensor(matrix), w)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def apart() -> Tensor:
    return torch.randn(N, 2, 4, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("topology", [Complete(), Ring(), RandomPair(7), OnePeerExponential(), ROLLED], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_the_order(order: str, accumulate: int, topology: Any) -> None:
    problem = Quadratics()
    seen = train(DPSGD(topology, order=order), sgd, 6, accumulate, apart())
    w = seen[0].double()
    for step in range(6):
        matrix = topology.matrix(step, N)
        if order == "average_while_computing":
            w = mix(matrix, w) - 0.01 * problem.gradients(w)
        elif order == "adapt_then_combine":
            w = mix(matrix, w - 0.01 * problem.gradients(w))
        else:
            w = mix(matrix, w)
            w = w - 0.01 * problem.gradients(w)
        torch.testing.assert_close(seen[step + 1].double(), w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("topology", [Ring(), RandomPair(7), OnePeerExponential(), ROLLED], ids=str)
def test_staleness_one(topology: Any) -> None:
    """w(t+1) = w(t) + 1/2 (W(t-1) - I) w(t-1) - a g(w(t)); nothing has arrived in the first step."""
    problem = Quadratics()
    seen = train(DPSGD(topology, staleness=1), sgd, 7, 2, apart())
    w, before = seen[0].double(), None
    for step in range(7):
        late = 0.0 if before is None else 0.5 * (mix(topology.matrix(step - 1, N), before) - before)
        w, before = w + late - 0.01 * problem.gradients(w), w
        torch.testing.assert_close(seen[step + 1].double(), w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("staleness", [0, 1])
def test_stale_gossip_keeps_the_mean_and_contracts(staleness: int) -> None:
    """Two learners as a pair for ever, W of eigenvalue 0, and a ring of four with one of -1/3: the hardest of both."""
    for topology in (FromMatrix(np.full((4, 4), 0.25)), Ring()):
        still = train(DPSGD(topology, staleness=staleness), lambda p: torch.optim.SGD(p, lr=0.0), 60, start=apart())
        torch.testing.assert_close(still[-1].mean(0), still[0].mean(0), rtol=1e-5, atol=1e-6)
        assert (still[-1] - still[-1].mean(0)).norm() < 1e-4 * (still[0] - still[0].mean(0)).norm()


@pytest.mark.parametrize("codec", [BFloat16(), Int8()], ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("topology", [Ring(), RandomPair(7), ROLLED], ids=str)
def test_compressed_gossip_stays_near_the_plain_one(topology: Any, order: str, codec: Any) -> None:
    plain = train(DPSGD(topology, order=order), sgd, 8, start=apart())[-1]
    packed = train(DPSGD(topology, order=order, compression=codec), sgd, 8, start=apart())[-1]
    distance = (packed - plain).abs().max()
    assert 0 < distance < 0.02 * plain.abs().max()


@pytest.mark.parametrize("codec", [BFloat16(), Int8(), Int8(error_feedback=False), TopK(ratio=0.25)], ids=str)
def test_compressed_gossip_does_not_move_the_mean(codec: Any) -> None:
    """Learners move by differences of published rows: what a codec loses, it loses twice, with both signs.

    Averages of rounded rows do move it, and more than ten times as far: shown beside.
    """
    start = apart()
    seen = train(DPSGD(Ring(), compression=codec), lambda p: torch.optim.SGD(p, lr=0.0), 100, start=start)
    moved = (seen[-1].mean(0) - start.mean(0)).norm()
    rounded = start.clone()
    for _ in range(100):
        rounded = mix(Ring().matrix(0, N), rounded.double()).float().to(torch.bfloat16).float()
    naive = (rounded.mean(0) - start.mean(0)).norm()
    assert moved < 1e-5
    assert naive > 10 * moved


def test_top_k_reaches_consensus() -> None:
    """A quarter of the changes a step; the differences shrink to nothing all the same."""
    start = apart()
    # The first estimate is that of learners that start alike: here they do not, so send everything once.
    model_start = start.mean(0, keepdim=True).expand(N, -1, -1)
    strategy = DPSGD(Ring(), compression=TopK(ratio=0.25, consensus_step=0.4))
    problem = Quadratics()
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=N, vectorize=False)
    with torch.no_grad():
        model.weight.copy_(model_start)
    for step in range(400):
        if step == 200:
            optimizer.param_groups[0]["lr"] = 0.0
            spread = handle.consensus_distance()
            mean = model.weight.detach().mean(0)
        optimizer.zero_grad()
        problem.loss(handle.model(problem.inputs), slice(None)).backward()
        optimizer.step()
    assert spread > 1e-3
    assert handle.consensus_distance() < 1e-3 * spread
    torch.testing.assert_close(model.weight.detach().mean(0), mean, rtol=1e-5, atol=1e-5)


def test_bytes_are_those_sent() -> None:
    sent = {}
    for name, codec in (("none", None), ("bf16", BFloat16()), ("int8", Int8()), ("topk", TopK(ratio=0.25))):
        model = nn.Linear(32, 32, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        handle = ddpcore.distribute(model, optimizer, DPSGD(Ring(), compression=codec), learners=4)
        handle.model(torch.ones(4, 2, 32)).sum().backward()
        optimizer.step()
        sent[name] = handle.learner.comm.bytes_sent
    numel = 32 * 32
    assert sent == {
        "none": 2 * 4 * numel,
        "bf16": 2 * 2 * numel,
        "int8": 2 * (numel + 4 * numel // 256),
        "topk": 2 * 8 * numel // 4,
    }


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("codec", [None, Int8()], ids=str)
@pytest.mark.parametrize("staleness", [0, 1])
def test_fused_and_torch_optimizers_agree(order: str, codec: Any, staleness: int) -> None:
    if staleness and order != ORDERS[0]:
        return
    ends = [
        train(DPSGD(Ring(), order=order, compression=codec, staleness=staleness), make, 6, start=apart())[-1]
        for make in (lambda p: FusedSGD(p, lr=0.01, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))
    ]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "combine"}, "unknown order 'combine'"),
        ({"staleness": 2}, "staleness is 2"),
        ({"staleness": 1, "order": ORDERS[1]}, "waits for its neighbours"),
        ({"staleness": 1, "compression": TopK()}, "need staleness 0"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPSGD(Ring(), **options)


def test_top_k_needs_the_same_neighbours_all_the_time() -> None:
    model = nn.Linear(1, 1)
    strategy = DPSGD(RandomPair(), compression=TopK())
    with pytest.raises(ValueError, match=r"topk keeps an estimate of each neighbour.*ring"):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, learners=4)


@pytest.mark.parametrize(("ratio", "consensus_step"), [(0.0, 0.3), (1.5, 0.3), (float("nan"), 0.3), (0.1, 0.0)])
def test_top_k_out_of_range(ratio: float, consensus_step: float) -> None:
    with pytest.raises(ValueError, match=r"TopK: (ratio|consensus_step) is"):
        TopK(ratio=ratio, consensus_step=consensus_step)
