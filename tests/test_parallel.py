"""distribute() around a user's loop: virtual learners in this process, and two real ranks."""

from __future__ import annotations

import copy
import functools
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ddpcore
from ddpcore.comm import StackedModel
from ddpcore.optim import FusedSGD

_spec = importlib.util.spec_from_file_location("ranks", Path(__file__).parent / "helpers" / "ranks.py")
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)

SMALL = {"bucket_bytes": 128, "first_bucket_bytes": 64}
L = 3
STRATEGIES = {
    "ssgd": ddpcore.SSGD,
    "dpsgd": lambda: ddpcore.DPSGD(ddpcore.Ring()),
    "local_sgd": lambda: ddpcore.LocalSGD(period=2),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda p: FusedSGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def mlp(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def samples(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, 5, generator=generator), torch.randint(3, shape, generator=generator)


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """The learners' mean losses, added up."""
    return sum(F.cross_entropy(row, label) for row, label in zip(outputs, labels, strict=True))


def stacked_weights(model: nn.Module, num_learners: int = L) -> Tensor:
    return torch.cat([p.detach().reshape(num_learners, -1) for p in model.parameters() if p.requires_grad], dim=1)


def flat_weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_near(ours: Tensor, theirs: Tensor, ulps: float = 8) -> None:
    unit = torch.finfo(torch.float32).eps * theirs.abs().max().item()
    worst = (ours - theirs).abs().max().item() / unit
    assert worst <= ulps, f"{worst:.1f} ULPs of the largest value apart"


# --- against plain torch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("strategy_name", STRATEGIES)
def test_any_optimizer_follows_the_equation(strategy_name: str, optimizer_name: str) -> None:
    """Learners written out as L plain models with L plain torch optimizers, moved by the strategy's equation."""
    model = mlp()
    twins = [copy.deepcopy(model) for _ in range(L)]
    plain = OPTIMIZERS["sgd" if optimizer_name == "fused" else optimizer_name]
    twin_optimizers = [plain(twin.parameters()) for twin in twins]
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    handle = ddpcore.distribute(model, optimizer, STRATEGIES[strategy_name](), learners=L, vectorize=False, **SMALL)
    for step in range(5):
        inputs, labels = samples(L, 4, seed=step)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(handle.model(inputs), labels).backward()
        optimizer.step()

        for twin, x, y in zip(twins, inputs, labels, strict=True):
            twin.zero_grad()
            F.cross_entropy(twin(x), y).backward()
        peers = [[p.detach().clone() for p in twin.parameters()] for twin in twins]
        for index in range(len(peers[0])):
            parameters = [list(twin.parameters())[index] for twin in twins]
            if strategy_name == "ssgd":
                mean = sum(p.grad for p in parameters) / L
                for p in parameters:
                    p.grad.copy_(mean)
            elif strategy_name == "dpsgd":  # a ring of three: everyone with everyone
                for p in parameters:
                    p.data.copy_(sum(peer[index] for peer in peers) / L)
        for each in twin_optimizers:
            each.step()
        if strategy_name == "local_sgd" and (step + 1) % 2 == 0:
            mean = sum(flat_weights(twin) for twin in twins) / L
            for twin in twins:
                nn.utils.vector_to_parameters(mean.clone(), twin.parameters())
    expected = torch.stack([flat_weights(twin) for twin in twins])
    # Adam divides by sqrt(v): near-zero gradients turn a rounding into more than one.
    assert_near(stacked_weights(model), expected, ulps=8 if optimizer_name in ("fused", "sgd") else 64)


def test_the_gradient_is_that_of_the_unmixed_weights() -> None:
    """Average-while-computing on 0.5 h_j (w - c_j)^2, not adapt-then-combine and not combine-then-adapt."""
    h, c = torch.tensor([1.0, 3.0]), torch.tensor([2.0, -1.0])
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Complete()), learners=2, vectorize=False)
    model.weight.data.copy_(torch.tensor([1.0, 5.0]).view(2, 1, 1))
    w = model.weight.detach().flatten().clone()
    optimizer.zero_grad()
    outputs = handle.model(torch.ones(2, 1, 1)).flatten()
    (0.5 * h * (outputs - c) ** 2).sum().backward()
    optimizer.step()
    gradient = h * (w - c)
    awc = w.mean() - 0.25 * gradient
    atc = (w - 0.25 * gradient).mean().expand(2)
    cta = w.mean() - 0.25 * h * (w.mean() - c)
    got = model.weight.detach().flatten()
    torch.testing.assert_close(got, awc, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(got, atc)
    assert not torch.allclose(got, cta)


def test_one_virtual_learner_is_plain_training() -> None:
    for strategy in STRATEGIES.values():
        model, plain = mlp(), mlp()
        optimizer, twin = (
            FusedSGD(model.parameters(), lr=0.1, momentum=0.9),
            torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9),
        )
        handle = ddpcore.distribute(model, optimizer, strategy(), learners=1)
        for step in range(4):
            inputs, labels = samples(1, 4, seed=step)
            optimizer.zero_grad()
            loss_of(handle.model(inputs), labels).backward()
            optimizer.step()
            twin.zero_grad()
            F.cross_entropy(plain(inputs[0]), labels[0]).backward()
            twin.step()
        assert_near(stacked_weights(model, 1)[0], flat_weights(plain))


@pytest.mark.parametrize("vectorize", [False, True])
def test_vectorized_learners_are_the_same(vectorize: bool) -> None:
    ends = []
    for vmap in (vectorize, False):
        model = mlp()
        optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(), learners=L, vectorize=vmap)
        for step in range(3):
            inputs, labels = samples(L, 4, seed=step)
            optimizer.zero_grad()
            loss_of(handle.model(inputs), labels).backward()
            optimizer.step()
        ends.append(stacked_weights(model))
    assert_near(*ends)


@pytest.mark.parametrize("strategy_name", STRATEGIES)
def test_param_groups_with_their_own_rules(strategy_name: str) -> None:
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
        handle = ddpcore.distribute(model, optimizer, STRATEGIES[strategy_name](), learners=L, **SMALL)
        for step in range(4):
            inputs, labels = samples(L, 4, seed=step)
            optimizer.zero_grad()
            loss_of(handle.model(inputs), labels).backward()
            optimizer.step()
        ends.append(stacked_weights(model))
    assert_near(*ends)


# --- the gradient ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_name", ["fused", "sgd"])
@pytest.mark.parametrize("how", ["no_sync", "backwards"])
def test_accumulation_is_one_big_batch(how: str, optimizer_name: str) -> None:
    """ssgd in three micro-batches a step, synchronised once or three times, and one learner on all samples."""
    model, plain = mlp(), mlp()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    twin = OPTIMIZERS["sgd"](plain.parameters())
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2, **SMALL)
    for step in range(3):
        inputs, labels = samples(2, 6, seed=step)
        optimizer.zero_grad(set_to_none=step != 1)
        for micro in range(3):
            part = slice(2 * micro, 2 * micro + 2)
            loss = loss_of(handle.model(inputs[:, part]), labels[:, part]) / 3
            if how == "no_sync" and micro < 2:
                with handle.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        twin.zero_grad()
        F.cross_entropy(plain(inputs.flatten(0, 1)), labels.flatten()).backward()
        twin.step()
    for row in stacked_weights(model, 2):
        assert_near(row, flat_weights(plain))


def test_nested_no_sync_stays_paused() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2)
    inputs, labels = samples(2, 4)
    with handle.no_sync():
        with handle.no_sync():
            pass
        loss_of(handle.model(inputs), labels).backward()
    grad = next(model.parameters()).grad
    assert not torch.equal(grad[0], grad[1]), "gradients were averaged inside no_sync()"


def test_gradients_are_the_mean_right_after_backward() -> None:
    model, plain = mlp(), mlp()
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2, **SMALL)
    inputs, labels = samples(2, 4)
    loss_of(handle.model(inputs), labels).backward()
    F.cross_entropy(plain(inputs.flatten(0, 1)), labels.flatten()).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        for row in ours.grad:
            assert_near(row, theirs.grad)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    before = stacked_weights(model, 2).clone()
    optimizer.step()
    moved = (stacked_weights(model, 2) - before).square().sum().sqrt()
    assert moved.item() == pytest.approx(0.1 * 0.01, rel=1e-3), "the step must use the clipped gradient"


def test_an_error_inside_backward_leaves_the_next_step_sound() -> None:
    """A backward pass that dies halfway must not stop the averaging of all that follow."""

    def explode(grad: Tensor) -> None:
        raise ArithmeticError("boom")

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2, vectorize=False, **SMALL)
    inputs, labels = samples(2, 4)
    hook = model[0].weight.register_hook(explode)
    with pytest.raises(ArithmeticError, match="boom"):
        loss_of(handle.model(inputs), labels).backward()
    hook.remove()
    assert model[2].bias.grad is not None, "the pass must fail after the first gradient, or this test tries nothing"
    optimizer.zero_grad()
    loss_of(handle.model(inputs), labels).backward()
    for parameter in model.parameters():
        assert torch.equal(parameter.grad[0], parameter.grad[1]), "gradients are no longer averaged"
    optimizer.step()
    plain = mlp()
    F.cross_entropy(plain(inputs.flatten(0, 1)), labels.flatten()).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for row in stacked_weights(model, 2):
        assert_near(row, flat_weights(plain))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.first, self.second = (nn.Linear(5, 3) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.always(inputs) + getattr(self, self.branch)(inputs)

    branch = "first"


def test_a_branch_used_only_under_no_sync() -> None:
    """Both branches get a gradient each step, in micro-batches of which only the last is synchronised."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2)
    for first, last in (("first", "second"), ("second", "first")):
        inputs, labels = samples(2, 4)
        optimizer.zero_grad()
        model.branch = first
        with handle.no_sync():
            loss_of(handle.model(inputs), labels).backward()
        model.branch = last
        loss_of(handle.model(inputs), labels).backward()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad[0], parameter.grad[1]), name
        optimizer.step()


def test_momentum_survives_a_first_step_without_synchronisation() -> None:
    """The parameters are laid out anew after the first synchronised backward: momentum must move along."""
    ends = []
    for make in (FusedSGD, torch.optim.SGD):
        model = mlp()
        # Registered the other way round than used, so that the new order is another one.
        model = nn.ModuleDict({"last": model[2], "first": model[0]})
        optimizer = make(model.parameters(), lr=0.1, momentum=0.9)

        class Chain(nn.Module):
            def __init__(self, parts: nn.ModuleDict) -> None:
                super().__init__()
                self.parts = parts

            def forward(self, inputs: Tensor) -> Tensor:
                return self.parts["last"](self.parts["first"](inputs).tanh())

        chain = Chain(model)
        handle = ddpcore.distribute(chain, optimizer, ddpcore.SSGD(), learners=2, **SMALL)
        for step in range(4):
            inputs, labels = samples(2, 4, seed=step)
            optimizer.zero_grad()
            if step < 2:
                with handle.no_sync():
                    loss_of(handle.model(inputs), labels).backward()
            else:
                loss_of(handle.model(inputs), labels).backward()
            optimizer.step()
        ends.append(stacked_weights(chain, 2))
    assert_near(*ends)


# --- what may stand in the optimizer and in the model ------------------------------------------------------------


@pytest.mark.parametrize("listed", [True, False], ids=["in the optimizer", "left out"])
@pytest.mark.parametrize("make", [FusedSGD, torch.optim.SGD], ids=["fused", "torch"])
@pytest.mark.parametrize("strategy_name", STRATEGIES)
def test_frozen_parameters(strategy_name: str, make: Any, listed: bool) -> None:
    """They stay as they are, and the others train as if they were not there."""
    model = mlp()
    model[0].requires_grad_(False)
    frozen = copy.deepcopy(model[0].state_dict())
    plain = [copy.deepcopy(model) for _ in range(L)]
    trained = [p for p in model.parameters() if listed or p.requires_grad]
    optimizer = make(trained, lr=0.1, momentum=0.9)
    twins = [torch.optim.SGD(p.parameters(), lr=0.1, momentum=0.9) for p in plain]
    handle = ddpcore.distribute(model, optimizer, STRATEGIES[strategy_name](), learners=L)
    for step in range(4):
        inputs, labels = samples(L, 4, seed=step)
        optimizer.zero_grad()
        loss_of(handle.model(inputs), labels).backward()
        optimizer.step()
        for twin, x, y in zip(plain, inputs, labels, strict=True):
            twin.zero_grad()
            F.cross_entropy(twin(x), y).backward()
        last = [twin[2] for twin in plain]
        for name in ("weight", "bias"):
            values = [getattr(layer, name) for layer in last]
            mean = sum(v.detach().clone() for v in values) / L
            mean_grad = sum(v.grad.clone() for v in values) / L
            for v in values:
                if strategy_name == "ssgd":
                    v.grad.copy_(mean_grad)
                elif strategy_name == "dpsgd":
                    v.data.copy_(mean)
        for twin in twins:
            twin.step()
        if strategy_name == "local_sgd" and step % 2 == 1:
            for name in ("weight", "bias"):
                mean = sum(getattr(layer, name).detach() for layer in last) / L
                for layer in last:
                    getattr(layer, name).data.copy_(mean)
    assert all(torch.equal(value, frozen[name]) for name, value in model[0].state_dict().items())
    assert_near(stacked_weights(model), torch.stack([flat_weights(twin[2]) for twin in plain]))


@pytest.mark.parametrize("make", [FusedSGD, torch.optim.SGD], ids=["fused", "torch"])
@pytest.mark.parametrize("strategy_name", STRATEGIES)
def test_parameters_that_no_learner_uses(strategy_name: str, make: Any) -> None:
    """Their gradient stays None and weight decay does not touch them, as in plain torch."""
    torch.manual_seed(0)
    model = Branches()
    start = copy.deepcopy(model.second.state_dict())
    moving = model.first.weight.detach().clone()
    optimizer = make(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    handle = ddpcore.distribute(model, optimizer, STRATEGIES[strategy_name](), learners=L, **SMALL)
    for step in range(3):
        inputs, labels = samples(L, 4, seed=step)
        optimizer.zero_grad()
        loss_of(handle.model(inputs), labels).backward()
        assert model.second.weight.grad is None
        optimizer.step()
    for name, value in model.second.state_dict().items():
        torch.testing.assert_close(value, start[name].expand_as(value), rtol=1e-6, atol=1e-7)
    assert not torch.allclose(model.first.weight, moving.expand_as(model.first.weight))


def test_a_parameter_first_used_late_is_refused_by_ssgd() -> None:
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2)
    inputs, labels = samples(2, 4)
    loss_of(handle.model(inputs), labels).backward()
    optimizer.step()
    model.branch = "second"
    with pytest.raises(RuntimeError, match=r"second\.(weight|bias).*first step"):
        loss_of(handle.model(inputs), labels).backward()


def test_dampening_of_a_parameter_whose_gradient_comes_later() -> None:
    """torch starts a momentum buffer undampened at the first gradient of each parameter."""
    ends = []
    for make in (FusedSGD, torch.optim.SGD):
        torch.manual_seed(0)
        model = Branches()
        optimizer = make(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(2), learners=2, vectorize=False)
        for step in range(4):
            inputs, labels = samples(2, 4, seed=step)
            optimizer.zero_grad()
            model.branch = "first"
            loss = loss_of(handle.model(inputs), labels)
            if step > 0:
                model.branch = "second"
                loss = loss + loss_of(handle.model(inputs), labels)
            loss.backward()
            optimizer.step()
        ends.append(stacked_weights(model, 2))
    assert_near(*ends)


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
            inputs, labels = samples(2, 4, seed=step)
            optimizer.zero_grad()
            loss_of(handle.model(inputs), labels).backward()
            optimizer.step()
            twin.zero_grad()
            F.cross_entropy(plain(inputs.flatten(0, 1)), labels.flatten()).backward()
            twin.step()
        assert model.a.weight is model.b.weight
        assert_near(model.a.weight.detach()[1], plain.a.weight.detach())
        evaluation = handle.evaluation_model()
        assert evaluation.a.weight is evaluation.b.weight
        assert_near(evaluation(inputs[0]).detach(), plain(inputs[0]).detach(), ulps=16)


def test_optimizer_and_model_must_hold_the_same_parameters() -> None:
    model = mlp()
    with pytest.raises(ValueError, match=r"2\.weight is not in the optimizer"):
        ddpcore.distribute(model, torch.optim.SGD(model[0].parameters(), lr=0.1), ddpcore.SSGD(), learners=2)
    foreign = [*model.parameters(), nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match="not in the model"):
        ddpcore.distribute(model, torch.optim.SGD(foreign, lr=0.1), ddpcore.SSGD(), learners=2)
    assert next(model.parameters()).shape == (7, 5), "a refused model is left alone"


@pytest.mark.parametrize("learners", [0, -1])
def test_impossible_number_of_learners(learners: int) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=str(learners)):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.SSGD(), learners=learners)


def test_real_ranks_need_a_process_group() -> None:
    for strategy in (ddpcore.SSGD(), ddpcore.DDP()):
        model = mlp()
        with pytest.raises(ValueError, match="torchrun"):
            ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)


def test_a_topology_that_does_not_fit_is_refused_before_anything_moves() -> None:
    model = mlp()
    strategy = ddpcore.DPSGD(ddpcore.FromMatrix(np.full((2, 2), 0.5)))
    with pytest.raises(ValueError, match="2 learners"):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, learners=3)


def test_inputs_need_a_row_for_each_learner() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=3)
    with pytest.raises(ValueError, match="2 rows for 3 learners"):
        handle.model(torch.zeros(2, 4, 5))


def backward_once(handle: Any, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(handle.model(inputs), labels)
    loss.backward()
    return loss


@pytest.mark.parametrize("strategy_name", STRATEGIES)
def test_a_closure_is_one_step_or_refused(strategy_name: str) -> None:
    """step(closure) gives what backward() and step() give, or a clear error; never something in between."""
    ends = []
    for by_closure in (False, True):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = ddpcore.distribute(model, optimizer, STRATEGIES[strategy_name](), learners=L)
        for step in range(4):
            closure = functools.partial(backward_once, handle, optimizer, *samples(L, 4, seed=step))
            if by_closure:
                try:
                    optimizer.step(closure)
                except (ValueError, RuntimeError, NotImplementedError) as error:
                    assert "closure" in str(error)
                    return
            else:
                closure()
                optimizer.step()
        ends.append(stacked_weights(model))
    assert_near(*ends)


# --- between steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_name", ["fused", "sgd", "adam"])
@pytest.mark.parametrize("strategy_name", STRATEGIES)
def test_a_saved_run_continues(strategy_name: str, optimizer_name: str) -> None:
    """State dicts taken after three steps bring a run that went astray back: steps 4 to 6 are the same, bit for bit."""
    model = mlp()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    handle = ddpcore.distribute(model, optimizer, STRATEGIES[strategy_name](), learners=L, vectorize=False, **SMALL)

    def train(steps: range) -> None:
        for step in steps:
            inputs, labels = samples(L, 4, seed=step)
            optimizer.zero_grad()
            loss_of(handle.model(inputs), labels).backward()
            optimizer.step()

    train(range(3))
    counted = handle.learner.step
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(range(3, 6))
    end = stacked_weights(model).clone()
    train(range(50, 53))
    assert not torch.equal(stacked_weights(model), end)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    handle.learner.step = counted
    train(range(3, 6))
    assert torch.equal(stacked_weights(model), end)


def test_state_goes_to_and_from_torch() -> None:
    """Two steps of FusedSGD, then torch.optim.SGD with its state, and the other way round."""
    ends = []
    for first, second in ((FusedSGD, torch.optim.SGD), (torch.optim.SGD, FusedSGD), (torch.optim.SGD, torch.optim.SGD)):
        model = mlp()
        strategy = ddpcore.LocalSGD(2)
        optimizer = first(model.parameters(), lr=0.1, momentum=0.9)
        handle = ddpcore.distribute(model, optimizer, strategy, learners=2, vectorize=False)
        for half in range(2):
            for step in range(2):
                inputs, labels = samples(2, 4, seed=step + 10 * half)
                optimizer.zero_grad()
                loss_of(handle.model(inputs), labels).backward()
                optimizer.step()
            if half == 0:
                state = copy.deepcopy(optimizer.state_dict())
                values = [p.detach()[0].clone() for p in model.parameters()]
                model = mlp()
                for parameter, value in zip(model.parameters(), values, strict=True):
                    parameter.data.copy_(value)
                optimizer = second(model.parameters(), lr=0.1, momentum=0.9)
                handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(2), learners=2, vectorize=False)
                optimizer.load_state_dict(state)
        ends.append(stacked_weights(model, 2))
    assert_near(ends[0], ends[2])
    assert_near(ends[1], ends[2])


def test_forward_without_gradient_changes_nothing() -> None:
    """Evaluation between forward passes of training starts no exchange."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(), learners=2)
    with torch.no_grad():
        handle.model(samples(2, 4)[0])
    assert handle.learner.comm.bytes_sent == 0


def test_parameters_stay_views_of_the_flat_buffer() -> None:
    model = mlp()
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    identities = [id(p) for p in model.parameters()]
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2, **SMALL)
    for step in range(3):
        inputs, labels = samples(2, 4, seed=step)
        optimizer.zero_grad()
        loss_of(handle.model(inputs), labels).backward()
        optimizer.step()
        storage = handle.learner.flat.param_LP.untyped_storage().data_ptr()
        assert all(p.untyped_storage().data_ptr() == storage for p in model.parameters())
        gradients = handle.learner.flat.grad_LP.untyped_storage().data_ptr()
        assert all(p.grad.untyped_storage().data_ptr() == gradients for p in model.parameters())
    assert [id(p) for p in model.parameters()] == identities
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == identities


# --- averages ----------------------------------------------------------------------------------------------------


def test_consensus_distance_of_known_weights() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(8), learners=2)
    assert handle.consensus_distance() == 0.0
    model.weight.data.copy_(torch.tensor([[[3.0, 0.0]], [[-3.0, 8.0]]]))
    # The mean is (0, 4): both are sqrt(9 + 16) away.
    assert handle.consensus_distance() == pytest.approx(5.0)
    model.weight.data.copy_(torch.tensor([[[1.0, 1.0]], [[1.0, 1.0]]]))
    assert handle.consensus_distance() == 0.0


def test_consensus_distance_weighs_learners_alike() -> None:
    model = nn.Linear(1, 1, bias=False)
    handle = ddpcore.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.LocalSGD(8), learners=4, vectorize=False
    )
    model.weight.data.copy_(torch.tensor([0.0, 0.0, 0.0, 4.0]).view(4, 1, 1))
    assert handle.consensus_distance() == pytest.approx(math.sqrt((1 + 1 + 1 + 9) / 4))


def test_evaluation_model_of_virtual_learners() -> None:
    """The mean of weights and of floating buffers; the model in training and its hooks are left as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Ring()), learners=L)
    assert isinstance(handle.model, StackedModel)
    for step in range(3):
        inputs, labels = samples(L, 8, seed=step)
        optimizer.zero_grad()
        loss_of(handle.model(inputs), labels).backward()
        optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert before["1.running_mean"].shape == (L, 4)
    assert not torch.allclose(before["1.running_mean"][0], before["1.running_mean"][1])
    evaluation = handle.evaluation_model()
    assert set(evaluation.state_dict()) == set(before)
    for name, value in evaluation.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, before[name].mean(dim=0), rtol=1e-6, atol=1e-7)
        else:
            assert value.item() == 3
    assert all(parameter.grad is None for parameter in evaluation.parameters())
    outputs = evaluation.eval()(inputs[0])  # one sample batch, no rows of learners
    assert outputs.shape == (8, 3)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in evaluation.modules())
    for tensor in (*evaluation.parameters(), *evaluation.buffers()):
        tensor.data.fill_(7)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    loss_of(handle.model(inputs), labels).backward()
    optimizer.step()


def test_evaluation_model_keeps_buffers_out_of_the_state_that_were_out_of_it() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)
            self.register_buffer("mask", torch.ones(3), persistent=False)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.linear(inputs) * self.mask

    plain, model = Masked(), Masked()
    handle = ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.SSGD(), learners=2)
    assert list(handle.evaluation_model().state_dict()) == list(plain.state_dict())


# --- baselines ---------------------------------------------------------------------------------------------------


def test_single_leaves_everything_alone() -> None:
    model = mlp()
    pointers = [p.data_ptr() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.Single())
    assert handle.model is model
    assert handle.learner is None
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert not model._forward_pre_hooks
    with handle.no_sync():
        pass
    assert handle.consensus_distance() == 0.0
    copied = handle.evaluation_model()
    assert copied is not model
    assert torch.equal(flat_weights(copied), flat_weights(model))


@pytest.mark.parametrize("baseline", [ddpcore.Single, ddpcore.DDP])
def test_baselines_take_no_virtual_learners(baseline: Any) -> None:
    """learners= is not silently dropped."""
    model = mlp()
    with pytest.raises(ValueError, match=r"learners|real ranks"):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), baseline(), learners=4)


# --- two real ranks ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return ranks.run("parallel_ranks", 2)


@pytest.mark.parametrize("how", ["no_sync", "backwards"])
def test_real_accumulation_is_one_big_batch(how: str, seen: list[dict[str, Any]]) -> None:
    plain = mlp()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
    for step in range(3):
        inputs, labels = samples(24, seed=step)
        optimizer.zero_grad()
        F.cross_entropy(plain(inputs), labels).backward()
        optimizer.step()
    for rank in seen:
        assert_near(rank[f"accumulation_{how}"], flat_weights(plain))
    assert torch.equal(seen[0][f"accumulation_{how}"], seen[1][f"accumulation_{how}"])


def test_real_clipping_after_backward(seen: list[dict[str, Any]]) -> None:
    plain = mlp()
    inputs, labels = samples(8)
    F.cross_entropy(plain(inputs), labels).backward()
    grads = torch.cat([p.grad.flatten() for p in plain.parameters()])
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for rank in seen:
        assert_near(rank["clipping"]["grads"], grads)
        assert rank["clipping"]["norm"].item() == pytest.approx(norm.item(), rel=1e-5)
        assert_near(rank["clipping"]["weights"], flat_weights(plain))


@pytest.mark.parametrize("fused", [False, True], ids=["torch", "fused"])
def test_real_unused_parameters(fused: bool, seen: list[dict[str, Any]]) -> None:
    """A layer that rank 0 alone uses, and one that nobody uses."""
    ssgd = [rank[f"unused_ssgd_{fused}"] for rank in seen]
    for name, value in ssgd[0]["end"].items():
        assert torch.equal(value, ssgd[1]["end"][name]), f"{name} differs between the ranks of ssgd"
    dpsgd = [rank[f"unused_dpsgd_{fused}"] for rank in seen]
    for one in (*ssgd, *dpsgd):
        assert not torch.equal(one["end"]["sometimes.weight"], one["start"]["sometimes.weight"])
        assert not torch.equal(one["end"]["always.weight"], one["start"]["always.weight"])
        assert torch.equal(one["end"]["never.weight"], one["start"]["never.weight"])
        assert one["never_grad"] is None
    # Rank 1 never stepped on that layer, but its weights are averaged with those of rank 0 that did.
    assert not torch.equal(dpsgd[0]["end"]["sometimes.weight"], dpsgd[1]["end"]["sometimes.weight"])


def test_real_evaluation_model(seen: list[dict[str, Any]]) -> None:
    first, second = (rank["batch_norm"] for rank in seen)
    for rank in (first, second):
        assert torch.equal(rank["first_mean"], torch.ones(4)), "buffers start from rank 0's"
        assert rank["untouched"]
        assert rank["still_untouched"]
        assert rank["hooks"] == 0
        assert not rank["shared"]
        assert not rank["exchanging"]
        for name, value in rank["average"].items():
            if value.is_floating_point():
                mean = (first["mine"][name] + second["mine"][name]) / 2
                torch.testing.assert_close(value, mean, rtol=1e-6, atol=1e-7)
                assert torch.equal(value, first["average"][name])
            else:
                assert value.item() == 3
    for name in ("0.weight", "1.running_mean"):
        assert not torch.equal(first["mine"][name], second["mine"][name])


def test_real_ssgd_is_torch_ddp(seen: list[dict[str, Any]]) -> None:
    """Two ranks: one addition, so the same bits as DistributedDataParallel up to where it divides."""
    for rank in seen:
        assert_near(rank["ddp_twin"]["ssgd"], rank["ddp_twin"]["ddp"], ulps=4)
        assert torch.equal(rank["ddp_twin"]["ddp"], seen[0]["ddp_twin"]["ddp"])


@pytest.mark.parametrize("make", ["fused", "torch"])
def test_real_frozen_parameters(make: str, seen: list[dict[str, Any]]) -> None:
    """A frozen layer that stands in the optimizer: DPSGD over everyone still averages the others each step."""
    start = mlp()
    ends, gradients = [rank["frozen"][make] for rank in seen], [rank["frozen"][f"{make}_grads"] for rank in seen]
    rows = [flat_weights(start[2])] * 2
    for step in range(2):
        mean = (rows[0] + rows[1]) / 2
        rows = [mean - 0.1 * gradients[rank][step] for rank in range(2)]
    for rank in range(2):
        assert torch.equal(ends[rank]["0.weight"], start[0].weight)
        got = torch.cat([ends[rank]["2.weight"].flatten(), ends[rank]["2.bias"]])
        assert_near(got, rows[rank])
