"""Hessians along a run: no bit of the training changes, and ranks say what virtual learners say."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ddpcore
from ddpcore.diagnostics import DataLoss, Hessian, HessianStatistics, spectra
from ddpcore.optim import FusedSGD
from helpers import drawn_runs, ranks
from helpers import hessian_ranks as training
from helpers.each import each

pytestmark = pytest.mark.usefixtures("one_thread")


FAST = ("ssgd", "local_sgd", "dpsgd_stale")


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    chosen = training.STRATEGIES if ranks.has_slow_items(request) else FAST
    return ranks.run("hessian_ranks", training.NUM_LEARNERS, more=[chosen] * training.NUM_LEARNERS)


def marked(strategy: str, *more: str) -> Any:
    return pytest.param(strategy, *more, marks=() if strategy in FAST else pytest.mark.slow)


@functools.cache
def virtual_learners(strategy: str) -> dict[str, Any]:
    return training.train(strategy, watched=True)


@pytest.mark.parametrize("strategy", map(marked, training.STRATEGIES))
def test_training_has_the_same_bits(strategy: str) -> None:
    watched, plain = virtual_learners(strategy), training.train(strategy, watched=False)
    for name in ("weights", "buffers"):
        for ours, theirs in zip(watched[name], plain[name], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(watched["random"], plain["random"])
    assert watched["bytes_sent"] == plain["bytes_sent"]
    assert [record["step"] for record in watched["records"]] == [3, 6]
    distances = [record["distance"] for record in watched["records"]]
    assert (distances == [0.0, 0.0]) == (strategy == "ssgd"), "the rounding of an average is no disagreement"
    assert all(record["problem"] is None for record in watched["records"])


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "transport"), [marked(*run) for run in training.RUNS])
def test_real_ranks_say_what_virtual_learners_say(strategy: str, transport: str, real: list[dict[Any, Any]]) -> None:
    virtual = virtual_learners(strategy)
    for rank, one in enumerate(real):
        seen = one[strategy, transport]
        assert all(torch.equal(a, b) for a, b in zip(seen["weights"][0], virtual["weights"][rank], strict=True))
        for ours, theirs in zip(seen["records"], virtual["records"], strict=True):
            for name in ("largest", "smallest", "distance", "disagreement", "penalty", "noise", "noise_shares"):
                if theirs[name] is None:
                    assert ours[name] is None, name
                else:  # sums of gradients in another order: fp32 rounding of eigenvalues near 1
                    assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_ranks_with_unequal_shares_have_the_hessian_of_all_samples(real: list[dict[Any, Any]]) -> None:
    alone = training.of_data()
    for one in real:
        torch.testing.assert_close(one["data"]["products"], alone["products"], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(one["data"]["values"], alone["values"], rtol=1e-7, atol=1e-9)
        assert one["data"]["averaged"].tolist() == [alone["products"].numel(), alone["products"].shape[1]]


@pytest.mark.slow
def test_two_ranks_two_learners_and_one_process(real: list[dict[Any, Any]]) -> None:
    """A sum of two products has one order, and a factor of 1/2 rounds nothing, so all have the same bits.

    The batches of both learners begin at a multiple of 64 bytes: elsewhere torch's kernels add in another order.
    """
    alone = training.of_two()
    assert alone[0] > alone[1] > alone[2]
    assert training.of_two(learners=2) == alone
    assert [one["two"] for one in real] == [alone, alone, None]


@each("seed", [7 * block + kind for block in range(3) for kind in range(6)], num_fast=6)
def test_two_learners_and_one_process_of_drawn_models(seed: int) -> None:
    """Each value is as near to an eigenvalue as its residual says; products round in fp32, a sum of some 1000 terms."""
    run = drawn_runs.Drawn(seed, strategy="ssgd")  # none with power iterations in each pass: those of 7 n + 6
    model, limits = copy.deepcopy(run.model), {"seed": 0, "tolerance": 1e-2}
    batches = list(zip(run.inputs(0), run.labels(0), strict=True))
    ends = Hessian(model, DataLoss(model, F.cross_entropy, batches)).eigenvalues(1, 1, **limits)
    statistics = HessianStatistics(run.handle, lambda: run.loss(0), every=1, top=1, **limits)
    run.step(0)
    (record,) = statistics.records
    scale = max(abs(ends.values))
    for ours, theirs, *residuals in zip(
        [*record.largest, record.smallest], ends.values, record.residuals, ends.residuals, strict=True
    ):
        assert abs(ours - theirs) <= sum(residuals) + 1000 * torch.finfo(torch.float32).eps * scale


@pytest.mark.slow
def test_ranks_share_the_points_of_a_landscape(real: list[dict[Any, Any]]) -> None:
    """Each point is computed by one rank, so it has the bits of one process."""
    alone = training.landscape_of()
    assert np.ptp(alone["train_loss"]) > 0.01 and not np.isnan(alone["max_eig"]).any()
    for one in real:
        for name, values in alone.items():
            assert np.array_equal(one["landscape"][name], values), name
            assert np.array_equal(one["resumed"][name], values), "rank 0 alone had a file with half of the points"


class Quadratic(nn.Module):
    """``1/2 w^T H w - b w``, H diagonal; the inputs of a learner are its b."""

    def __init__(self, curvature: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(len(curvature)))
        self.curvature = curvature

    def forward(self, b: torch.Tensor) -> torch.Tensor:
        return (0.5 * self.curvature * self.w.square() - b.mean(0) * self.w).sum()


def quadratic(every: int = 1) -> tuple[Any, Any, Any, torch.Tensor]:
    curvature = torch.cat([torch.tensor([9.0, 6.0, -2.0]), torch.linspace(0.1, 1, 60)])
    model = Quadratic(curvature)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(period=100), learners=3, vectorize=False)
    targets = torch.randn(3, 1, 63, generator=torch.Generator().manual_seed(0))
    statistics = HessianStatistics(handle, lambda: handle.model(targets).sum(), every=every, top=2, tolerance=1e-6)
    return handle, optimizer, statistics, targets


def test_shares_in_closed_form() -> None:
    """The eigenvectors are axes, so shares are squares of coordinates. Two steps, then the record of the third."""
    handle, optimizer, statistics, targets = quadratic(every=3)
    for _ in range(3):
        optimizer.zero_grad()
        handle.model(targets).sum().backward()
        weights = torch.stack([model.w.detach().clone() for model in handle.models]).double()
        gradients = torch.stack([model.w.grad.clone() for model in handle.models]).double()
        optimizer.step()
    (record,) = statistics.records
    assert record.largest == pytest.approx([9.0, 6.0], rel=1e-4)
    assert record.smallest == pytest.approx(-2.0, rel=1e-4)
    assert max(record.residuals) < 1e-2
    for rows, total, shares in (
        (weights, record.distance, record.disagreement),
        (gradients, record.noise, record.noise_shares),
    ):
        squares = (rows - rows.mean(0)).square().mean(0)
        assert total == pytest.approx(float(squares.sum()), rel=1e-4)
        assert shares == pytest.approx((squares[:2] / squares.sum()).tolist(), rel=1e-3)
    assert record.isotropic == pytest.approx(1 / 63)


def test_penalty_against_the_dense_hessian() -> None:
    """``1/2 tr(H C)`` with H of the mean of all learners' losses, at the mean of their weights."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = FusedSGD(model.parameters(), lr=0.2)
    handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(period=100), learners=3)
    inputs, targets = torch.randn(3, 8, 3), torch.randn(3, 8, 2)
    loss_of = lambda outputs: (outputs - targets).square().mean(dim=(1, 2)).sum()  # noqa: E731
    statistics = HessianStatistics(handle, lambda: loss_of(handle.model(inputs)), every=5, top=2)
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(handle.model(inputs)).backward()
        rows = [nn.utils.parameters_to_vector(one.parameters()).detach().double() for one in handle.models]
        optimizer.step()
    weights = torch.stack(rows)
    layers = copy.deepcopy(handle.models[0]).double()

    def mean_loss(vector: torch.Tensor) -> torch.Tensor:
        shapes, parts = {}, vector.split([parameter.numel() for parameter in layers.parameters()])
        for (name, parameter), part in zip(layers.named_parameters(), parts, strict=True):
            shapes[name] = part.view_as(parameter)
        outputs = torch.func.functional_call(layers, shapes, (inputs.double().flatten(0, 1),))
        return (outputs - targets.double().flatten(0, 1)).square().mean()

    dense = torch.autograd.functional.hessian(mean_loss, weights.mean(0))
    apart = weights - weights.mean(0)
    (record,) = statistics.records
    assert record.penalty == pytest.approx(float(torch.trace(dense @ (apart.T @ apart / 3))) / 2, rel=1e-4)
    increase = torch.stack([mean_loss(row) for row in weights]).mean() - mean_loss(weights.mean(0))
    assert record.penalty == pytest.approx(increase.item(), rel=0.2), "to second order"


def test_noise_in_the_weights_is_the_distance() -> None:
    """Learners of NoisySSGD are identical except for the noise with which they compute their gradients."""
    curvature = torch.cat([torch.tensor([9.0, 6.0]), torch.linspace(0.1, 1, 4).repeat(250)[:998]])
    model = Quadratic(curvature)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    strategy = ddpcore.NoisySSGD(0.5, where="per_learner")
    handle = ddpcore.distribute(model, optimizer, strategy, learners=3, vectorize=False)
    targets = torch.zeros(3, 1, 1000)
    statistics = HessianStatistics(handle, lambda: handle.model(targets).sum(), every=1, top=2, tolerance=1e-6)
    for _ in range(2):
        optimizer.zero_grad()
        outputs = handle.model(targets)
        rows = torch.stack([model.w.detach().clone() for model in handle.models]).double()
        outputs.sum().backward()
        optimizer.step()
        record = statistics.records[-1]
        squares = (rows - rows.mean(0)).square().mean(0)
        assert record.distance == pytest.approx(float(squares.sum()), rel=1e-5)
        assert record.distance == pytest.approx(0.5**2 * 1000 * 2 / 3, rel=0.2)
        assert record.disagreement == pytest.approx((squares[:2] / squares.sum()).tolist(), rel=1e-3)
    assert torch.equal(handle.models[0].w, handle.models[2].w)


def test_weights_that_are_not_finite_do_not_end_the_run() -> None:
    handle, optimizer, statistics, targets = quadratic()
    optimizer.zero_grad()
    (handle.model(targets) * float("inf")).sum().backward()
    targets[0, 0, 0] = float("nan")
    handle.models[0].curvature[5] = float("nan")
    statistics.before_step(handle.learner)
    (record,) = statistics.records
    assert "not finite" in record.problem
    assert record.disagreement is None
    assert all(value != value for value in record.largest)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"every": 0}, "every is 0"), ({"top": 63}, "top is 63"), ({"tolerance": 0.0}, "tolerance is 0.0")],
)  # fmt: skip
def test_refused(options: dict[str, Any], text: str) -> None:
    handle, *_ = quadratic()
    num = len(handle.observers)
    with pytest.raises(ValueError, match=text):
        HessianStatistics(handle, lambda: torch.ones(()), **options)
    assert len(handle.observers) == num


def test_a_model_without_learners() -> None:
    """One device: both ends of the spectrum at each second step, and no bit of the training changes."""
    inputs, labels = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    weights = []
    for watched in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(model: nn.Module = model) -> torch.Tensor:
            return nn.functional.cross_entropy(model(inputs), labels)

        if watched:
            statistics = HessianStatistics(model, loss, optimizer=optimizer, every=2, top=2, tolerance=1e-6)
            other = HessianStatistics(model, loss, optimizer=optimizer)
            other.num_steps = 48
        for _ in range(3):
            optimizer.zero_grad()
            loss().backward()
            if watched and statistics.num_steps == 1:
                expected = Hessian(model, loss).eigenvalues(2, 1, tolerance=1e-6)
            optimizer.step()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*weights, strict=True))
    (record,) = statistics.records
    assert (record.step, other.records[0].step) == (2, 50)
    assert [*record.largest, record.smallest] == pytest.approx(expected.values, rel=1e-4)
    assert (record.distance, record.disagreement, record.noise) == (0.0, None, None)
    statistics.close()
    optimizer.step()
    assert statistics.num_steps == 3


@pytest.mark.parametrize("strategy", [ddpcore.SSGD, lambda: ddpcore.DPSGD(ddpcore.Ring())])
def test_a_layer_of_learners_is_frozen_on_the_way(strategy: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    inputs, labels = torch.randn(3, 20, 4), torch.randint(3, (3, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handle = ddpcore.distribute(model, optimizer, strategy(), learners=3)

    def loss(models: Any = handle.models) -> torch.Tensor:
        return sum(F.cross_entropy(one(x), y) for one, x, y in zip(models, inputs, labels, strict=True))

    statistics = HessianStatistics(handle, loss, every=1, top=2, tolerance=1e-7)
    most = HessianStatistics(handle, loss, every=2, top=40)  # more than there are after step 1
    for step in range(2):
        for one in handle.models:
            one[2].requires_grad_(step == 0)
        optimizer.zero_grad()
        loss().backward()
        mean = handle.evaluation_model()
        mean[2].requires_grad_(step == 0)
        optimizer.step()
        exact = Hessian(mean, lambda mean=mean: loss([mean] * 3) / 3)
        expected, record = exact.eigenvalues(2, 1, tolerance=1e-7), statistics.records[-1]
        assert [*record.largest, record.smallest] == pytest.approx(expected.values, rel=1e-4, abs=1e-6)
        assert record.isotropic == 1 / exact.numel
    assert exact.numel == 30
    (record,) = most.records
    assert record.problem is None
    assert [*record.largest, record.smallest] == pytest.approx(exact.eigenvalues(29, 1).values, rel=1e-3, abs=1e-6)


def test_one_model_is_frozen_and_unfrozen_on_the_way() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    inputs, labels = torch.randn(20, 4), torch.randint(3, (20,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = lambda: F.cross_entropy(model(inputs), labels)  # noqa: E731
    model[2].requires_grad_(False)
    statistics, made = HessianStatistics(model, loss, optimizer=optimizer, every=1, top=2), Hessian(model, loss)
    for layer, is_trained in ((2, True), (0, False)):
        model[layer].requires_grad_(is_trained)
        with pytest.raises(ValueError, match="other parameters are trained now than when this Hessian was made"):
            made.trace(6)
        made = Hessian(model, loss)
        expected = made.eigenvalues(2, 1)
        optimizer.step()
        assert [*statistics.records[-1].largest, statistics.records[-1].smallest] == expected.values.tolist()
        assert statistics.records[-1].isotropic == 1 / made.numel
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that needs a gradient"):
        optimizer.step()


def test_push_sum_and_plain_models_are_refused() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="pass optimizer="):
        HessianStatistics(model, lambda: torch.ones(()))
    with pytest.raises(ValueError, match="is no loop"):
        HessianStatistics("model", lambda: torch.ones(()))  # type: ignore[arg-type]
    handle = ddpcore.distribute(
        model, FusedSGD(model.parameters(), lr=0.1), ddpcore.PushSum(ddpcore.Ring()), learners=3
    )
    with pytest.raises(ValueError, match="push_sum does not train"):
        HessianStatistics(handle, lambda: torch.ones(()))


@pytest.mark.parametrize("optimizer", [FusedSGD, torch.optim.SGD])
def test_noise_is_that_of_gradients_without_a_scaler(optimizer: type[torch.optim.Optimizer]) -> None:
    """A fused optimizer unscales its gradients itself, and the scaler those of torch's."""
    noise = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 3)
        inputs, targets = torch.randn(5, 20, 8), torch.randint(3, (5, 20))
        steps = optimizer(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, steps, ddpcore.DPSGD(ddpcore.Ring()), learners=5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)

        def loss(handle: Any = handle, inputs: Any = inputs, targets: Any = targets) -> torch.Tensor:
            return sum(F.cross_entropy(one, target) for one, target in zip(handle.model(inputs), targets, strict=True))

        statistics = HessianStatistics(handle, loss, every=2, top=2)
        for _ in range(2):
            steps.zero_grad()
            scaler.scale(loss()).backward()
            scaler.step(steps)
            scaler.update()
        noise.append(statistics.records[0].noise)
    assert noise[1] == pytest.approx(noise[0], rel=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-8, 1.0, 1e22])
def test_the_scale_of_the_loss_is_that_of_the_spectrum(scale: float) -> None:
    """Squares of such norms are no numbers of float32, and ARPACK's tolerance has an absolute floor."""
    values = torch.linspace(-1, 1, 64)
    like = torch.ones(64)
    operator = spectra.Operator(product=lambda rows: rows * (values * scale), like=like)
    density = spectra.spectral_density(operator, 64, 8, seed=0)
    assert ((density.nodes / scale) ** 2 * density.weights).sum(axis=1).mean() == pytest.approx(0.344, rel=0.05)
    found = spectra.extreme_eigenvalues(operator, 3, 1, seed=0, tolerance=1e-6, max_products=1000)
    assert found.values / scale == pytest.approx([1, 61 / 63, 59 / 63, -1], abs=3e-6)
    assert found.residuals.max() < 3e-6 * scale


@pytest.mark.parametrize("num", [33, 64, 100])
@pytest.mark.parametrize("value", [1.0, -1.0])
def test_a_multiple_of_the_identity(value: float, num: int) -> None:
    """A matrix that a shift makes zero has no start vector, which ended a step in an error of ARPACK."""
    operator = spectra.Operator(product=lambda rows: rows * value, like=torch.ones(num, dtype=torch.float64))
    found = spectra.extreme_eigenvalues(operator, 2, 2, seed=0, tolerance=1e-6, max_products=1000)
    assert found.values == pytest.approx([value] * 4)


def test_an_eigenvalue_beside_the_smallest_is_not_taken_for_it() -> None:
    values = torch.cat([torch.tensor([-0.1572, -0.1503, -0.138, -0.12]), torch.linspace(-0.1, 0.3, 70), torch.ones(1)])
    operator = spectra.Operator(product=lambda rows: rows * values, like=torch.zeros(75))
    for seed in range(20):
        found = spectra.extreme_eigenvalues(operator, 1, 1, seed=seed, tolerance=1e-3, max_products=1000)
        assert found.values[1] == pytest.approx(-0.1572, abs=1e-3), seed
