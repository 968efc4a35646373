"""The three orders, staleness and compression, against their equations in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore import DPSGD, Complete, FromMatrix, OnePeerExponential, RandomPair, Ring
from ddpcore.optim import FusedSGD
from ddpcore.strategies.compression import BFloat16, Int4, Int8, SparseTopK, TopK
from ddpcore.strategies.dpsgd import ORDERS
from helpers.training import rows_of, set_rows

ROLLED = FromMatrix(0.7 * np.eye(4) + 0.3 * np.roll(np.eye(4), 1, axis=0))
N = 4


class Quadratics:
    """One least-squares problem for each learner, and its gradients at weights ``[n, 2, 4]``."""

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
        set_rows(handle, "weight", start)
    seen = [rows_of(handle, "weight")]
    for _ in range(num_steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            rows = slice(part * 6 // accumulate, (part + 1) * 6 // accumulate)
            problem.loss(handle.model(problem.inputs[:, rows]), rows).backward()
        optimizer.step()
        seen.append(rows_of(handle, "weight"))
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
    """w(t+1) = w(t) + 1/2 (W(t-1) - I) w(t-1) - a g(w(t)), without an average in the first step."""
    problem = Quadratics()
    seen = train(DPSGD(topology, staleness=1), sgd, 7, 2, apart())
    w, before = seen[0].double(), None
    for step in range(7):
        late = 0.0 if before is None else 0.5 * (mix(topology.matrix(step - 1, N), before) - before)
        w, before = w + late - 0.01 * problem.gradients(w), w
        torch.testing.assert_close(seen[step + 1].double(), w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("staleness", [0, 1])
def test_stale_gossip_keeps_the_mean_and_contracts(staleness: int) -> None:
    """The hardest cases: two learners that are always a pair (eigenvalue 0 of W), a ring of four (eigenvalue -1/3)."""
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


SPARSE = SparseTopK(kept=4, chunk=16, consensus_step=0.2)


@pytest.mark.parametrize(
    "codec", [BFloat16(), Int8(), Int8(error_feedback=True), Int4(), TopK(ratio=0.25), SPARSE], ids=str
)
def test_compressed_gossip_does_not_move_the_mean(codec: Any) -> None:
    """Learners move by differences of published rows, so the loss of a codec occurs twice, with opposite signs.

    Plain averages of rounded rows move the mean more than ten times as far.
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


@pytest.mark.parametrize(
    "codec",
    [TopK(), TopK(ratio=0.01), TopK(ratio=0.25), Int8(error_feedback=True), Int4(error_feedback=True), SPARSE],
    ids=str,
)
@pytest.mark.parametrize("topology", [Ring(), Complete()], ids=str)
@pytest.mark.parametrize("n", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_codecs_of_differences_reach_consensus(n: int, topology: Any, codec: Any) -> None:
    """2000 parameters, one problem for each learner. When gradients stop, differences only shrink."""
    model = nn.Linear(2000, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = ddpcore.distribute(model, optimizer, DPSGD(topology, compression=codec), learners=n)
    centres = torch.randn(n, 1, 2000, generator=torch.Generator().manual_seed(1))

    def steps(count: int) -> float:
        for _ in range(count):  # without passes, which take longer than all else: the average begins in the step
            for one, centre in zip(handle.models, centres, strict=True):
                one.weight.grad = one.weight.detach() - centre
            optimizer.step()
        return handle.consensus_distance()

    steps(60)
    optimizer.param_groups[0]["lr"] = 0.0
    mean = rows_of(handle, "weight").mean(0)
    count = 300 if getattr(codec, "ratio", 1) == 0.01 else 100  # the codec that sends least takes longest
    spread, first, second = handle.consensus_distance(), steps(count), steps(count)
    assert spread > 1
    assert first < 0.5 * spread
    assert second < max(0.7 * first, 1e-4)
    torch.testing.assert_close(rows_of(handle, "weight").mean(0), mean, rtol=1e-4, atol=1e-4)


def test_error_feedback_leaves_no_residual() -> None:
    """Rounded weights never reach consensus; rounded differences do."""
    ends = {}
    for feedback in (False, True):
        model = nn.Linear(300, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        strategy = DPSGD(Ring(), compression=Int8(error_feedback=feedback))
        handle = ddpcore.distribute(model, optimizer, strategy, learners=N)
        for step in range(100):
            optimizer.zero_grad()
            handle.model(torch.randn(N, 1, 300)).sum().backward()
            optimizer.step()
            if step == 3:
                optimizer.param_groups[0]["lr"] = 0.0
        ends[feedback] = handle.consensus_distance()
    assert ends[True] < 1e-4 * ends[False]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_do_not_move_the_mean(dtype: torch.dtype, order: str) -> None:
    """Plain averages of rounded weights move the mean. DPSGD adds the rounding error to the next average."""
    start = torch.randn(N, 64, 8, generator=torch.Generator().manual_seed(3)).to(dtype)
    model = nn.Linear(8, 64, bias=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    strategy = DPSGD(RandomPair(3), order=order)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=N, vectorize=False)
    set_rows(handle, "weight", start)
    naive = start.clone()
    for step in range(100):
        optimizer.zero_grad()
        handle.model(torch.zeros(N, 1, 8, dtype=dtype)).sum().backward()
        optimizer.step()
        naive = mix(RandomPair(3).matrix(step, N), naive.double()).to(dtype)
    kept = strategy._remainder_LP
    assert kept is not None
    ours = rows_of(handle, "weight").double().reshape(N, -1) + kept[:, : 64 * 8].double()
    truth = start.double().reshape(N, -1).mean(0)
    drift, naive_drift = (ours.mean(0) - truth).norm(), (naive.double().reshape(N, -1).mean(0) - truth).norm()
    assert naive_drift > 100 * drift


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
        ({"order": "combine"}, "order is 'combine': choose from average_while"),
        ({"staleness": 2}, "staleness is 2"),
        ({"staleness": 1, "order": ORDERS[1]}, "waits for its neighbours"),
        ({"staleness": 1, "compression": TopK()}, "need staleness 0"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPSGD(Ring(), **options)


def test_a_directed_topology_may_not_bear_staleness() -> None:
    shift = FromMatrix(0.9 * np.roll(np.eye(5), 1, axis=0) + 0.1 * np.eye(5))
    for staleness in (0, 1):
        model = nn.Linear(1, 1)
        optimizer, strategy = torch.optim.SGD(model.parameters(), lr=0.1), DPSGD(shift, staleness=staleness)
        if staleness == 0:
            ddpcore.distribute(model, optimizer, strategy, learners=5)
        else:
            with pytest.raises(ValueError, match=r"staleness 1 drives them apart \(spectral radius 1.0\d"):
                ddpcore.distribute(model, optimizer, strategy, learners=5)
    for n in (2, 3, 4, 5, 6, 8):
        model = nn.Linear(1, 1)
        strategy = DPSGD(OnePeerExponential(), staleness=1)
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, learners=n)


def test_training_in_eval_mode_keeps_the_order() -> None:
    """With frozen batch normalisation the forward pass still combines."""
    ends = []
    for mode in (True, False):
        problem = Quadratics()
        model = nn.Linear(4, 2, bias=False)
        optimizer = sgd(model.parameters())
        handle = ddpcore.distribute(model, optimizer, DPSGD(Ring(), order=ORDERS[2]), learners=N, vectorize=False)
        set_rows(handle, "weight", apart())
        handle.model.train(mode)
        for _ in range(4):
            optimizer.zero_grad()
            problem.loss(handle.model(problem.inputs), slice(None)).backward()
            optimizer.step()
        ends.append(rows_of(handle, "weight"))
    assert torch.equal(*ends)


def test_combining_first_needs_a_forward_pass() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddpcore.distribute(model, optimizer, DPSGD(Ring(), order=ORDERS[2]), learners=2)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(RuntimeError, match="combines in the forward pass and there was none"):
        optimizer.step()


def test_weights_that_are_loaded_after_a_pass_without_a_step_are_combined() -> None:
    """As where a loss is not finite: a rollback replaces what the pass has combined."""
    rows: list[Tensor] = []
    kept: list[dict[str, Tensor]] = []
    for has_pass in (True, False):
        torch.manual_seed(0)
        model, inputs = nn.Linear(4, 2), torch.randn(6, N, 5, 4)
        optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = ddpcore.distribute(model, optimizer, DPSGD(Ring(), order=ORDERS[2]), learners=N)
        for step in range(6):
            optimizer.zero_grad()
            if step == 3:
                if has_pass:
                    handle.model(inputs[step])
                for one, state in zip(handle.models, kept, strict=True):
                    one.load_state_dict(state)
                continue
            handle.backward(handle.model(inputs[step]).square().mean((1, 2)))
            optimizer.step()
            if step == 1:
                kept = [{name: value.clone() for name, value in one.state_dict().items()} for one in handle.models]
        rows.append(rows_of(handle, "weight"))
    assert torch.equal(*rows)


def test_top_k_needs_the_same_neighbours_all_the_time() -> None:
    model = nn.Linear(1, 1)
    strategy = DPSGD(RandomPair(), compression=TopK())
    with pytest.raises(ValueError, match=r"topk keeps an estimate of each neighbour.*ring"):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, learners=4)


@pytest.mark.parametrize(("ratio", "consensus_step"), [(0.0, 0.3), (1.5, 0.3), (float("nan"), 0.3), (0.1, 0.0)])
def test_top_k_out_of_range(ratio: float, consensus_step: float) -> None:
    with pytest.raises(ValueError, match=r"TopK: (ratio|consensus_step) is"):
        TopK(ratio=ratio, consensus_step=consensus_step)
