"""Weights of learners: averages of batches of different size, and the minimum of a weighted loss."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore import (
    ADPSGD,
    DPSGD,
    SSGD,
    Complete,
    Connection,
    FromMatrix,
    GASLoC,
    GradientTracking,
    LocalSGD,
    NoLoCo,
    OnePeerExponential,
    Policies,
    PushSum,
    RandomPair,
    Ring,
    SlowMo,
    Star,
    Weighted,
)
from ddpcore.diagnostics import NoiseStatistics
from ddpcore.distributed.handle import Observer
from ddpcore.strategies.base import check_deaths
from ddpcore.strategies.compression import Int8
from ddpcore.strategies.learner import Learner
from ddpcore.strategies.ssgd import counts_of
from ddpcore.topology.describe import describe
from ddpcore.topology.wrapped import Damped, Slowed
from helpers.each import each
from helpers.training import weights_of_learners

N = 4
P = np.array([1.0, 2.0, 3.0, 2.0])
BASES = [Ring(), Complete(), Star(), RandomPair(seed=1)]


# ---- the topology ----


@each("base", BASES)
def test_metropolis_hastings(base: Any) -> None:
    """Rows sum to one, W is self-adjoint for p, no entry is negative, and edges are those of the base."""
    chosen = Weighted(base, P)
    chosen.validate(N)
    for step in range(5):
        mixing, given = chosen.matrix(step, N), base.matrix(step, N)
        np.testing.assert_allclose(mixing.sum(axis=1), 1, atol=1e-15)
        np.testing.assert_allclose(P[:, None] * mixing, (P[:, None] * mixing).T, atol=1e-15)
        assert (mixing >= 0).all()
        expected = np.minimum(given, given.T * P / P[:, None])
        apart = ~np.eye(N, dtype=bool)
        np.testing.assert_allclose(mixing[apart], expected[apart], atol=1e-15)


@each("base", BASES)
def test_equal_weights_change_nothing(base: Any) -> None:
    chosen = Weighted(base, [3, 3, 3, 3])
    assert [chosen.rounds(step, N) for step in range(4)] == [base.rounds(step, N) for step in range(4)]
    assert chosen.kept_weights(N) is None
    assert chosen.spectral_gap(N) == pytest.approx(base.spectral_gap(N), abs=1e-12)


@each("base", [Ring(), Complete(), Star()])
def test_the_spectral_gap(base: Any) -> None:
    """Repeated averages come closer to the weighted mean by 1 - gap a step, in the end."""
    chosen, values = Weighted(base, P), np.array([5.0, -1.0, 2.0, 0.5])
    mean, gap = P @ values / P.sum(), chosen.spectral_gap(N)
    powers = [np.linalg.matrix_power(chosen.matrix(0, N), k) @ values - mean for k in (20, 21)]
    distances = [np.sqrt(P @ apart**2) for apart in powers]
    assert distances[1] <= (1 - gap) * distances[0] * (1 + 1e-6) + 1e-15
    assert describe(chosen, N).spectral_gap == gap


def test_a_given_matrix_with_its_weights() -> None:
    mixing = Weighted(Ring(), P).matrix(0, N)
    chosen = FromMatrix(mixing, weights=P)
    assert chosen.rounds(0, N) == Weighted(Ring(), P).rounds(0, N)
    np.testing.assert_allclose(chosen.kept_weights(N), P / P.mean())
    with pytest.raises(ValueError, match=r"column \d sums to"):
        FromMatrix(mixing)
    with pytest.raises(ValueError, match=r"column \d sums to"):
        FromMatrix(mixing, weights=[1, 2, 3, 4])
    assert chosen != FromMatrix(np.eye(N) / 2 + 1 / 8)


def test_wrapped_topologies_keep_the_weights() -> None:
    for chosen in (Damped(Weighted(Ring(), P), 0.3), Slowed(Weighted(Ring(), P), lambda step: step // 2)):
        chosen.validate(N)
        np.testing.assert_allclose(P @ chosen.matrix(0, N), P, atol=1e-14)


# ---- gradients: one process with the batches of all learners ----


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def batches(sizes: list[int], seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 5, generator=generator), torch.randn(n, 3, generator=generator)) for n in sizes]


SIZES = [[1, 2, 3, 2], [1, 2, 3, 2], [2, 1, 0, 0], [4, 4, 4, 4], [1, 2, 3, 2]]  # the third is an incomplete batch


@pytest.mark.parametrize("weights", ["samples", "given"])
def test_ssgd_is_one_process_with_all_samples(weights: str) -> None:
    """Within 1e-6 a step, with unequal and empty batches."""
    sizes = SIZES if weights == "samples" else [SIZES[0]] * 5
    alone = model_of()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    model = copy.deepcopy(alone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = SSGD(weights="samples" if weights == "samples" else SIZES[0])
    handle = ddpcore.distribute(model, optimizer, strategy, learners=N, vectorize=False)
    for step, counts in enumerate(sizes):
        parts = batches(counts, step)
        reference.zero_grad()
        loss_of(alone(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
        reference.step()
        optimizer.zero_grad()
        handle.num_samples = counts
        for one, (x, y) in zip(handle.models, parts, strict=True):
            loss_of(one(x), y).backward()  # NaN without samples
        optimizer.step()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * (step + 1))
    assert torch.equal(*weights_of_learners(handle)[:2])


def test_exact_sums_give_the_same_bits() -> None:
    """Integers, batches of 1, 2, 4 and 1 samples: nothing is rounded."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = ddpcore.distribute(model, optimizer, SSGD("samples"), learners=N, vectorize=False)
    counts, generator = [1, 2, 4, 1], torch.Generator().manual_seed(0)
    inputs = [torch.randint(-9, 9, (n, 3), generator=generator).float() for n in counts]
    handle.num_samples = counts
    sum(one(x).mean() for one, x in zip(handle.models, inputs, strict=True)).backward()
    assert torch.equal(model.weight.grad[0], torch.cat(inputs).mean(dim=0))


@each("given", [[2, 2, 2, 2], "samples"])
def test_equal_weights_give_the_same_bits(given: Any) -> None:
    """SSGD and LocalSGD; the shares are None, so that nothing is multiplied."""
    makers: list[Callable[..., Any]] = [SSGD, lambda **more: LocalSGD(2, **more)]
    for make in makers:
        ends = []
        for weights in (None, given):
            model = model_of()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            handle = ddpcore.distribute(model, optimizer, make(weights=weights), learners=N, vectorize=False)
            for step in range(4):
                handle.num_samples = [5] * N
                optimizer.zero_grad()
                (x, y), *_ = batches([4 * 6], step)
                loss_each(handle.model(x.view(N, 6, 5)), y.view(N, 6, 3)).backward()
                optimizer.step()
            ends.append(weights_of_learners(handle))
            assert handle.learner.shares is None
        assert torch.equal(*ends)


def loss_each(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.stack([loss_of(*pair) for pair in zip(outputs, targets, strict=True)]).sum()


# ---- averages of weights, on quadratics 1/2 (w - b_j)^2, whose weighted minimum is sum_j p_j b_j / sum_j p_j ----

MINIMA = torch.tensor([[1.0, -2.0], [0.5, 4.0], [-3.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
WEIGHTED = (torch.from_numpy(P)[:, None] * MINIMA).sum(0) / P.sum()


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float32))

    def forward(self, minimum: Tensor) -> Tensor:
        return 0.5 * (self.weight - minimum).square().sum()


class Run:
    def __init__(self, strategy: Any, lr: float = 0.2, **options: Any) -> None:
        self.model = Point()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.handle = ddpcore.distribute(self.model, self.optimizer, strategy, learners=N, vectorize=False, **options)

    def step(self, num: int = 1, counts: Any = None) -> Tensor:
        for _ in range(num):
            self.optimizer.zero_grad()
            self.handle.num_samples = [int(p) for p in P] if counts is None else counts
            self.handle.model(MINIMA.float()).sum().backward()
            self.optimizer.step()
        return weights_of_learners(self.handle).double()


GOSSIP = {
    "tracking": lambda topology: GradientTracking(topology),
    "dpsgd": lambda topology: DPSGD(topology),
    "adapt then combine": lambda topology: DPSGD(topology, order="adapt_then_combine"),
    "stale": lambda topology: DPSGD(topology, staleness=1),
    "gasloc": lambda topology: GASLoC(topology, period=2, outer_momentum=0.2),
    "noloco": lambda topology: NoLoCo(topology, period=2, outer_momentum=0.2),
}


@pytest.mark.slow
@each(("name", "base"), [(name, base) for name in GOSSIP for base in (Ring(), RandomPair(seed=1), Star())])
def test_gossip_finds_the_minimum_of_the_weighted_loss(name: str, base: Any) -> None:
    """The mean that is kept is the weighted one: with equal curvatures it is exact, though learners stay apart."""
    run = Run(GOSSIP[name](Weighted(base, P)))
    weights = run.step(900 if name == "tracking" else 200)  # slow on a star
    found = (torch.from_numpy(P)[:, None] * weights).sum(0) / P.sum()
    torch.testing.assert_close(found, WEIGHTED, rtol=0, atol=2e-6)
    if name == "tracking":  # each learner is there
        torch.testing.assert_close(weights, WEIGHTED.expand(N, 2), rtol=0, atol=2e-6)
    average = run.handle.evaluation_model().weight.double()
    torch.testing.assert_close(average, WEIGHTED, rtol=0, atol=2e-6)
    assert (WEIGHTED - MINIMA.mean(0)).abs().min() > 0.1  # the minimum without weights is another one


@each("fragments", [1, [["weight"]]])
def test_local_sgd_by_its_equation(fragments: Any) -> None:
    """Two rounds of two steps, with the samples of both steps of a round."""
    for word, power in (("samples", 1), ("tokens", 2)):
        run, w = Run(LocalSGD(2, weights=word, fragments=fragments)), torch.zeros(N, 2, dtype=torch.float64)
        for counts in ([[1, 2, 0, 2], [0, 2, 6, 2]], [[1, 1, 1, 1], [2, 0, 1, 0]]):
            for step in counts:
                run.step(counts=step)
                w = w - 0.2 * (w - MINIMA)
            p = torch.tensor(counts, dtype=torch.float64).sum(0) ** power
            w = ((p[:, None] * w).sum(0) / p.sum()).expand(N, 2)
            torch.testing.assert_close(weights_of_learners(run.handle).double(), w, rtol=0, atol=1e-6)


@pytest.mark.slow
@each("options", [{}, {"group": 2}, {"overlap": 1}, {"compression": Int8()}, {"compression": Int8(), "group": 2}])
def test_outer_steps_weight_pseudo_gradients(options: Any) -> None:
    """phi <- phi - lr (phi - m) with the weighted m; groups average weighted gradients, so they go to their minimum."""
    outer = lambda p: torch.optim.SGD(p, lr=0.5)  # noqa: E731
    run = Run(LocalSGD(2, outer=outer, weights=P, **options))
    weights = run.step(300)
    tolerance = 6e-3 if "compression" in options else 1e-5  # half a step of int8 of the largest change, 1.3
    torch.testing.assert_close(weights, WEIGHTED.expand(N, 2), rtol=0, atol=tolerance)


def test_an_evaluation_between_averages_is_weighted() -> None:
    run = Run(LocalSGD(5, weights=P))
    weights = run.step(3)
    found = run.handle.evaluation_model().weight.double()
    torch.testing.assert_close(found, (torch.from_numpy(P)[:, None] * weights).sum(0) / P.sum(), rtol=0, atol=1e-6)


def test_a_saved_state_has_the_samples_of_the_round() -> None:
    first, second = (Run(LocalSGD(3, weights="samples")) for _ in range(2))
    first.step(2, counts=[5, 1, 1, 1])
    saved = copy.deepcopy((first.model.state_dict(), first.handle.state_dict()))
    second.model.load_state_dict(saved[0])
    second.handle.load_state_dict(saved[1])
    assert torch.equal(first.step(counts=[1, 1, 1, 1]), second.step(counts=[1, 1, 1, 1]))
    assert first.handle.learner.shares is not None
    assert torch.equal(first.handle.learner.shares, second.handle.learner.shares)


# ---- bad input: ValueError before anything has started ----

BAD = {
    "SSGD([1, 2, -1, 1])": (lambda: SSGD([1, 2, -1, 1]), "at least one must be above 0, and none below"),
    "SSGD([0, 0, 0, 0])": (lambda: SSGD([0, 0, 0, 0]), "at least one must be above 0"),
    "SSGD([1, 2, 3])": (lambda: SSGD([1, 2, 3]), "3 weights and 4 learners"),
    "SSGD(nan)": (lambda: SSGD([1, 2, float("nan"), 1]), "none below"),
    "SSGD(words)": (lambda: SSGD("sample"), "'sample': give a number for each learner, or samples or tokens"),
    "SSGD(3)": (lambda: SSGD(3), "give a number for each learner"),  # type: ignore[arg-type]
    "LocalSGD": (lambda: LocalSGD(2, weights=[1, 2]), "2 weights and 4 learners"),
    "LocalSGD, topology": (lambda: LocalSGD(2, weights=P, topology=Ring()), "take Weighted"),
    "zero in a topology": (lambda: DPSGD(Weighted(Ring(), [1, 0, 1, 1])), "each must be above 0"),
    "too few in a topology": (lambda: DPSGD(Weighted(Ring(), [1, 2])), "2 weights and 4 learners"),
    "one direction": (lambda: DPSGD(Weighted(OnePeerExponential(), [1, 2, 3, 4])), "not connected"),
    "push-sum": (lambda: PushSum(Weighted(Ring(), P)), "push-sum has its own"),
    "adpsgd": (lambda: ADPSGD(Weighted(Ring(), P)), "averages all learners alike"),
    "slowmo": (lambda: SlowMo(DPSGD(Weighted(Ring(), P))), "averages all learners alike"),
}


@each(("make", "message"), BAD.values())
def test_bad_weights(make: Any, message: str) -> None:
    model = Point()
    before = model.weight.data_ptr()
    with pytest.raises(ValueError, match=message):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), make(), learners=N, policies=Policies())
    assert model.weight.data_ptr() == before


@each("bad", [None, [1, 2, 3], [1, 2, None, 4], [1, 2, -3, 4], [0, 0, 0, 0]])
def test_samples_that_are_not_set(bad: Any) -> None:
    run = Run(SSGD("samples"))
    run.optimizer.zero_grad()
    if bad is not None:
        run.handle.num_samples = bad
    with pytest.raises(ValueError, match=r"num_samples of learner|have 0 samples"):
        run.handle.model(MINIMA.float()).sum().backward()
    assert weights_of_learners(run.handle).eq(0).all()


@each("counts", [np.array([1, 2, 4, 1]), torch.tensor([1, 2, 4, 1]), [1.0, *map(np.int64, (2, 4, 1))]])
def test_samples_may_be_any_numbers(counts: Any) -> None:
    runs = [Run(SSGD("samples")) for _ in range(2)]
    assert torch.equal(runs[0].step(1, [1, 2, 4, 1]), runs[1].step(1, counts))
    for one in (np.int64(3), torch.tensor(3), 3.0):
        assert counts_of(one, 2).tolist() == [3, 3]


def test_samples_without_effect_are_a_warning() -> None:
    """A loop that sets them may expect that they weight the learners."""
    for strategy, warns in ((SSGD(), True), (DPSGD(Ring()), True), (SSGD("samples"), False)):
        run = Run(strategy)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run.step()
        text = f"{strategy.name} counts no samples, so num_samples has no effect: pass weights='samples'"
        assert [str(one.message).startswith(text) for one in found] == [True] * warns


def test_samples_count_in_one_step() -> None:
    """A loop that forgets to set those of a smaller last batch would weigh it as the batch before."""
    for strategy, num_before in ((SSGD("samples"), 1), (LocalSGD(2, weights="samples"), 2)):
        run = Run(strategy)
        before = run.step(num_before)
        with pytest.raises(ValueError, match="num_samples of learner 0, 1, 2, 3 was not set in each step"):
            for _ in range(num_before):
                run.optimizer.zero_grad()
                run.handle.model(MINIMA.float()).sum().backward()
                run.optimizer.step()
        if num_before == 1:
            assert torch.equal(weights_of_learners(run.handle).double(), before)
        else:  # local steps were taken, and nothing was averaged
            moved = before - 0.2 * (before - MINIMA)
            torch.testing.assert_close(
                weights_of_learners(run.handle).double(), moved - 0.2 * (moved - MINIMA), rtol=0, atol=1e-6
            )


@each("make", [lambda: SSGD(P), lambda: DPSGD(Weighted(Ring(), P)), lambda: LocalSGD(2, weights="samples")])
def test_learners_with_weights_do_not_die(make: Any) -> None:
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="weights are of these learners"):
        check_deaths(make(), N)
    with pytest.raises(ValueError, match="weights are of these learners"):
        ddpcore.distribute(model, optimizer, make(), learners=N, connection=Connection(on_failure="shrink"))


@each("make", [lambda: SSGD(P), lambda: DPSGD(Weighted(Ring(), P))])
def test_statistics_compare_equal_batches(make: Any) -> None:
    run = Run(make())
    with pytest.raises(ValueError, match="batches of one size"):
        NoiseStatistics(run.handle, run.optimizer, batch_size=1)


class _Begins(Observer):
    def __init__(self, begun: list[int]) -> None:
        self.begun = begun

    def before_forward(self, learner: Learner) -> None:
        self.begun.append(learner.step)


@pytest.mark.parametrize("pauses", [False, True])
@pytest.mark.parametrize("empty", [(1,), (1, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("after", [0, 3], ids=["ssgd", "local_sgd"])
def test_a_virtual_learner_without_samples_needs_no_pass(after: int, empty: tuple[int, ...], pauses: bool) -> None:
    """In steps 0, 2 and 4. The steps after them begin anew, and local steps may lack a pass, too."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    weights = torch.cat([one.detach().flatten() for one in model.parameters()]).double().repeat(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = LocalSGD(8, switch_step=after, weights="samples") if after else SSGD(weights="samples")
    handle = ddpcore.distribute(model, optimizer, strategy, learners=3, vectorize=False)
    begun = []
    handle.observers.append(_Begins(begun))
    for step in range(5):
        counts = [0 if not step % 2 and one in empty else one + 1 + step for one in range(3)]
        batches = [torch.randn(count, 4) for count in counts]
        handle.num_samples = counts
        for pause in (True, False) if pauses else (False,):
            for one, batch in zip(handle.models, batches, strict=True):
                with handle.no_sync() if pause else nullcontext():
                    if len(batch):
                        (one(batch[:, :3]) - batch[:, 3:]).square().mean().div(1 + pauses).backward()
        optimizer.step()
        optimizer.zero_grad()
        grads = torch.zeros_like(weights)
        for row, (own, batch) in enumerate(zip(weights, batches, strict=True)):
            if len(batch):
                inputs = torch.cat([batch[:, :3], torch.ones(len(batch), 1)], dim=1).double()
                grads[row] = 2 * inputs.T @ (inputs @ own - batch[:, 3].double()) / len(batch)
        if not after or step < after:
            shares = torch.tensor(counts, dtype=torch.float64)
            grads = ((shares / shares.sum()) @ grads).expand(3, -1)
        weights -= 0.1 * grads
        seen = [torch.cat([one.detach().flatten() for one in own.parameters()]) for own in handle.models]
        torch.testing.assert_close(torch.stack(seen).double(), weights, rtol=1e-5, atol=1e-6)
    assert sorted(set(begun)) == [*range(5)], "a step that has no beginning"
