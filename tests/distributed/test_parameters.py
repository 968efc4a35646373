"""The parameters of model and optimizer that distribute() supports, and those that it refuses."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ddpcore
from ddpcore.optim import FusedSGD
from helpers import training
from helpers.connection import connected


@pytest.mark.parametrize("listed", [True, False], ids=["in the optimizer", "left out"])
@pytest.mark.parametrize("make", [FusedSGD, torch.optim.SGD], ids=["fused", "torch"])
@pytest.mark.parametrize("strategy_name", training.STRATEGIES)
def test_frozen_parameters(strategy_name: str, make: Any, listed: bool) -> None:
    """They do not change, and the others train as without them."""
    model = training.mlp()
    model[0].requires_grad_(False)
    frozen = copy.deepcopy(model[0].state_dict())
    plain = [copy.deepcopy(model) for _ in range(training.L)]
    trained = [p for p in model.parameters() if listed or p.requires_grad]
    optimizer = make(trained, lr=0.1, momentum=0.9)
    twins = [torch.optim.SGD(p.parameters(), lr=0.1, momentum=0.9) for p in plain]
    handle = ddpcore.distribute(model, optimizer, training.STRATEGIES[strategy_name](), learners=training.L)
    for step in range(4):
        inputs, labels = training.samples(training.L, 4, seed=step)
        optimizer.zero_grad()
        training.loss_of(handle.model(inputs), labels).backward()
        optimizer.step()
        for twin, x, y in zip(plain, inputs, labels, strict=True):
            twin.zero_grad()
            F.cross_entropy(twin(x), y).backward()
        last = [twin[2] for twin in plain]
        for name in ("weight", "bias"):
            values = [getattr(layer, name) for layer in last]
            mean = sum(v.detach().clone() for v in values) / training.L
            mean_grad = sum(v.grad.clone() for v in values) / training.L
            for v in values:
                if strategy_name == "ssgd":
                    v.grad.copy_(mean_grad)
                elif strategy_name == "dpsgd":
                    v.data.copy_(mean)
        for twin in twins:
            twin.step()
        if strategy_name == "local_sgd" and step % 2 == 1:
            for name in ("weight", "bias"):
                mean = sum(getattr(layer, name).detach() for layer in last) / training.L
                for layer in last:
                    getattr(layer, name).data.copy_(mean)
    assert all(torch.equal(value, frozen[name]) for name, value in model[0].state_dict().items())
    training.assert_near(
        training.weights_of_learners(handle), torch.stack([training.flat_weights(twin[2]) for twin in plain])
    )


@pytest.mark.parametrize("make", [FusedSGD, torch.optim.SGD], ids=["fused", "torch"])
@pytest.mark.parametrize("strategy_name", training.STRATEGIES)
def test_parameters_that_no_learner_uses(strategy_name: str, make: Any) -> None:
    """Their gradient stays None and weight decay does not change them, as in plain torch."""
    torch.manual_seed(0)
    model = training.Branches()
    start = copy.deepcopy(model.second.state_dict())
    moving = model.first.weight.detach().clone()
    optimizer = make(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    handle = ddpcore.distribute(
        model, optimizer, training.STRATEGIES[strategy_name](), learners=training.L, **connected(**training.SMALL)
    )
    for step in range(3):
        inputs, labels = training.samples(training.L, 4, seed=step)
        optimizer.zero_grad()
        training.loss_of(handle.model(inputs), labels).backward()
        assert model.second.weight.grad is None
        optimizer.step()
    for name, value in model.second.state_dict().items():
        torch.testing.assert_close(value, start[name], rtol=1e-6, atol=1e-7)
    assert not torch.allclose(model.first.weight, moving)


def test_dampening_of_a_parameter_whose_gradient_comes_later() -> None:
    """torch starts a momentum buffer undampened at the first gradient of each parameter."""
    ends = []
    for make in (FusedSGD, torch.optim.SGD):
        torch.manual_seed(0)
        model = training.Branches()
        optimizer = make(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(2), learners=2, vectorize=False)
        for step in range(4):
            inputs, labels = training.samples(2, 4, seed=step)
            optimizer.zero_grad()
            for one in handle.models:
                one.branch = "first"
            loss = training.loss_of(handle.model(inputs), labels)
            if step > 0:
                for one in handle.models:
                    one.branch = "second"
                loss = loss + training.loss_of(handle.model(inputs), labels)
            loss.backward()
            optimizer.step()
        ends.append(training.weights_of_learners(handle))
    training.assert_near(*ends)


def test_tied_weights_train_as_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)
            self.b.weight = self.a.weight

        def forward(self, inputs: Tensor) -> Tensor:
            return self.b(self.a(inputs).tanh())[..., :3]

    for vectorize in (False, True):
        torch.manual_seed(0)
        model = Tied()
        plain = copy.deepcopy(model)
        optimizer, twin = FusedSGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2, vectorize=vectorize)
        for step in range(3):
            inputs, labels = training.samples(2, 4, seed=step)
            optimizer.zero_grad()
            training.loss_of(handle.model(inputs), labels).backward()
            optimizer.step()
            twin.zero_grad()
            F.cross_entropy(plain(inputs.flatten(0, 1)), labels.flatten()).backward()
            twin.step()
        assert model.a.weight is model.b.weight
        training.assert_near(handle.models[1].a.weight.detach(), plain.a.weight.detach())
        assert handle.models[1].a.weight is handle.models[1].b.weight
        evaluation = handle.evaluation_model()
        assert evaluation.a.weight is evaluation.b.weight
        training.assert_near(evaluation(inputs[0]).detach(), plain(inputs[0]).detach(), ulps=16)


def test_optimizer_and_model_must_hold_the_same_parameters() -> None:
    model = training.mlp()
    with pytest.raises(ValueError, match=r"2\.weight is not in the optimizer"):
        ddpcore.distribute(model, torch.optim.SGD(model[0].parameters(), lr=0.1), ddpcore.SSGD(), learners=2)
    foreign = [*model.parameters(), nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match="not in the model"):
        ddpcore.distribute(model, torch.optim.SGD(foreign, lr=0.1), ddpcore.SSGD(), learners=2)
    assert next(model.parameters()).shape == (7, 5), "a refused model does not change"


@pytest.mark.parametrize("learners", [0, -1])
def test_impossible_number_of_learners(learners: int) -> None:
    model = training.mlp()
    with pytest.raises(ValueError, match=str(learners)):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.SSGD(), learners=learners)


def test_real_ranks_need_a_process_group() -> None:
    for strategy in (ddpcore.SSGD(), ddpcore.DDP()):
        model = training.mlp()
        with pytest.raises(ValueError, match="torchrun"):
            ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)


def test_a_topology_that_does_not_fit_leaves_the_model_unchanged() -> None:
    model = training.mlp()
    strategy = ddpcore.DPSGD(ddpcore.FromMatrix(np.full((2, 2), 0.5)))
    with pytest.raises(ValueError, match="2 learners"):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, learners=3)


def test_inputs_need_a_row_for_each_learner() -> None:
    model = training.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=3)
    with pytest.raises(ValueError, match="2 rows for 3 learners"):
        handle.model(torch.zeros(2, 4, 5))


def backward_once(handle: Any, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = training.loss_of(handle.model(inputs), labels)
    loss.backward()
    return loss


@pytest.mark.parametrize("strategy_name", training.STRATEGIES)
def test_a_closure_is_one_step_or_refused(strategy_name: str) -> None:
    """step(closure) gives the same as backward() and step(), or an error."""
    ends = []
    for by_closure in (False, True):
        model = training.mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = ddpcore.distribute(model, optimizer, training.STRATEGIES[strategy_name](), learners=training.L)
        for step in range(4):
            closure = functools.partial(backward_once, handle, optimizer, *training.samples(training.L, 4, seed=step))
            if by_closure:
                try:
                    optimizer.step(closure)
                except (ValueError, RuntimeError, NotImplementedError) as error:
                    assert "closure" in str(error)
                    return
            else:
                closure()
                optimizer.step()
        ends.append(training.weights_of_learners(handle))
    training.assert_near(*ends)
