"""distribute() with virtual learners, against plain torch and the equations."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ddpcore
from ddpcore.optim import FusedSGD
from ddpcore.strategies.registry import STRATEGIES
from helpers import training
from helpers.connection import connected


@pytest.mark.parametrize("optimizer_name", training.OPTIMIZERS)
@pytest.mark.parametrize("strategy_name", training.STRATEGIES)
def test_any_optimizer_follows_the_equation(strategy_name: str, optimizer_name: str) -> None:
    """Against L plain models with L plain torch optimizers, averaged by the equation of the strategy."""
    model = training.mlp()
    twins = [copy.deepcopy(model) for _ in range(training.L)]
    plain = training.OPTIMIZERS["sgd" if optimizer_name == "fused" else optimizer_name]
    twin_optimizers = [plain(twin.parameters()) for twin in twins]
    optimizer = training.OPTIMIZERS[optimizer_name](model.parameters())
    handle = ddpcore.distribute(
        model,
        optimizer,
        training.STRATEGIES[strategy_name](),
        learners=training.L,
        vectorize=False,
        **connected(**training.SMALL),
    )
    for step in range(5):
        inputs, labels = training.samples(training.L, 4, seed=step)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        training.loss_of(handle.model(inputs), labels).backward()
        optimizer.step()

        for twin, x, y in zip(twins, inputs, labels, strict=True):
            twin.zero_grad()
            F.cross_entropy(twin(x), y).backward()
        peers = [[p.detach().clone() for p in twin.parameters()] for twin in twins]
        for index in range(len(peers[0])):
            parameters = [list(twin.parameters())[index] for twin in twins]
            if strategy_name == "ssgd":
                mean = sum(p.grad for p in parameters) / training.L
                for p in parameters:
                    p.grad.copy_(mean)
            elif strategy_name == "dpsgd":  # in a ring of three each learner averages with all
                for p in parameters:
                    p.data.copy_(sum(peer[index] for peer in peers) / training.L)
        for each in twin_optimizers:
            each.step()
        if strategy_name == "local_sgd" and (step + 1) % 2 == 0:
            mean = sum(training.flat_weights(twin) for twin in twins) / training.L
            for twin in twins:
                nn.utils.vector_to_parameters(mean.clone(), twin.parameters())
    expected = torch.stack([training.flat_weights(twin) for twin in twins])
    # Adam divides by sqrt(v), which enlarges the rounding errors of near-zero gradients.
    training.assert_near(
        training.weights_of_learners(handle), expected, ulps=8 if optimizer_name in ("fused", "sgd") else 64
    )


def test_the_gradient_is_that_of_the_unmixed_weights() -> None:
    """Average-while-computing on 0.5 h_j (w - c_j)^2, not adapt-then-combine and not combine-then-adapt."""
    h, c = torch.tensor([1.0, 3.0]), torch.tensor([2.0, -1.0])
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Complete()), learners=2, vectorize=False)
    for one, value in zip(handle.models, (1.0, 5.0), strict=True):
        one.weight.data.fill_(value)
    w = training.weights_of_learners(handle).flatten()
    optimizer.zero_grad()
    outputs = handle.model(torch.ones(2, 1, 1)).flatten()
    (0.5 * h * (outputs - c) ** 2).sum().backward()
    optimizer.step()
    gradient = h * (w - c)
    awc = w.mean() - 0.25 * gradient
    atc = (w - 0.25 * gradient).mean().expand(2)
    cta = w.mean() - 0.25 * h * (w.mean() - c)
    got = training.weights_of_learners(handle).flatten()
    torch.testing.assert_close(got, awc, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(got, atc)
    assert not torch.allclose(got, cta)


@pytest.mark.parametrize(
    ("strategy", "num_learners", "warns"), [("dpsgd", 1, True), ("ssgd", 1, False), ("dpsgd", 2, False)]
)
def test_one_learner_that_averages_nothing_gets_a_warning(strategy: str, num_learners: int, warns: bool) -> None:
    model = training.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddpcore.distribute(model, optimizer, STRATEGIES.build(strategy, topology=ddpcore.Ring()), learners=num_learners)
    texts = [str(one.message) for one in caught if one.category is UserWarning]
    text = (
        "dpsgd: there is one learner, so nothing is averaged (outer steps go on): start more ranks, or pass learners="
    )
    assert texts == [text] * warns


def test_one_virtual_learner_is_plain_training() -> None:
    for strategy in training.STRATEGIES.values():
        model, plain = training.mlp(), training.mlp()
        optimizer, twin = (
            FusedSGD(model.parameters(), lr=0.1, momentum=0.9),
            torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9),
        )
        handle = ddpcore.distribute(model, optimizer, strategy(), learners=1)
        for step in range(4):
            inputs, labels = training.samples(1, 4, seed=step)
            optimizer.zero_grad()
            training.loss_of(handle.model(inputs), labels).backward()
            optimizer.step()
            twin.zero_grad()
            F.cross_entropy(plain(inputs[0]), labels[0]).backward()
            twin.step()
        training.assert_near(training.weights_of_learners(handle)[0], training.flat_weights(plain))


@pytest.mark.parametrize("vectorize", [False, True])
def test_vectorized_learners_are_the_same(vectorize: bool) -> None:
    ends = []
    for vmap in (vectorize, False):
        model = training.mlp()
        optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(), learners=training.L, vectorize=vmap)
        for step in range(3):
            inputs, labels = training.samples(training.L, 4, seed=step)
            optimizer.zero_grad()
            training.loss_of(handle.model(inputs), labels).backward()
            optimizer.step()
        ends.append(training.weights_of_learners(handle))
    training.assert_near(*ends)


@pytest.mark.parametrize("strategy_name", training.STRATEGIES)
def test_parameter_groups_with_different_options(strategy_name: str) -> None:
    """Groups in any order, one without momentum: FusedSGD and torch.optim.SGD agree."""
    ends = []
    for make in (FusedSGD, torch.optim.SGD):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))
        groups = [
            {"params": [model[2].weight, model[0].bias], "lr": 0.05, "momentum": 0.0},
            {"params": [model[0].weight, model[4].bias], "weight_decay": 0.1, "nesterov": True},
            {"params": [model[4].weight, model[2].bias]},
        ]
        optimizer = make(groups, lr=0.1, momentum=0.9)
        handle = ddpcore.distribute(
            model, optimizer, training.STRATEGIES[strategy_name](), learners=training.L, **connected(**training.SMALL)
        )
        for step in range(4):
            inputs, labels = training.samples(training.L, 4, seed=step)
            optimizer.zero_grad()
            training.loss_of(handle.model(inputs), labels).backward()
            optimizer.step()
        ends.append(training.weights_of_learners(handle))
    training.assert_near(*ends)


@pytest.mark.parametrize(
    ("strategy", "name"), [(ddpcore.DPSGD(ddpcore.Ring()), "DPSGD(Ring("), (ddpcore.Single(), "torch alone")]
)
def test_a_handle_says_what_it_is(strategy: ddpcore.Strategy, name: str) -> None:
    model = training.mlp()
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    learners = None if name == "torch alone" else 4
    handle = ddpcore.distribute(model, optimizer, strategy, learners=learners)
    assert repr(handle).startswith(f"<{name}") and repr(handle).endswith(f", {handle.comm.description}>")


class Viewing(nn.Module):
    """Has a buffer, and an attribute, that are views of another buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("first", self.table[:2])
        self.square = self.table.view(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.table.mul_(0.5)
        return self.layer(inputs) * self.first.sum() * self.square.sum()


@pytest.mark.parametrize("learners", [1, 3])
@pytest.mark.parametrize("vectorize", [True, False])
def test_views_of_buffers_stay_views(learners: int, vectorize: bool) -> None:
    """A learner alone begins as each rank does."""
    model = Viewing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=learners, vectorize=vectorize)
    x = torch.ones(learners, 2, 3)
    for outputs in handle.model(x) if learners > 1 else [model(x[0])]:
        torch.testing.assert_close(outputs, 2 * model.layer(x[0]).expand_as(outputs))
    evaluated = handle.evaluation_model()
    evaluated.table.fill_(7)
    for one, value in [*((one, 0.5) for one in handle.models), (evaluated, 7)]:
        assert one.first.eq(value).all() and one.square.eq(value).all()
