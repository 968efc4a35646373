"""First mistakes with virtual learners get an error that names the way out."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ddpcore

L = 3


def trained(strategy: ddpcore.Strategy, **options) -> tuple[ddpcore.Distributed, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ddpcore.distribute(model, optimizer, strategy, **{"learners": L, **options}), optimizer


def test_backward_adds_the_losses_of_all_learners():
    x, y = torch.randn(L, 6, 5), torch.randint(3, (L, 6))
    grads = []
    for as_tensor in (False, True):
        handle, _ = trained(ddpcore.DPSGD(ddpcore.Ring()))
        losses = [F.cross_entropy(output, labels) for output, labels in zip(handle.model(x), y, strict=True)]
        handle.backward(torch.stack(losses) if as_tensor else losses)
        grads.append([[p.grad.clone() for p in model.parameters()] for model in handle.models])
    alone, _ = trained(ddpcore.DPSGD(ddpcore.Ring()))
    for row, model in enumerate(alone.models):
        F.cross_entropy(model(x[row]), y[row]).backward()
        for found in grads:
            for one, p in zip(found[row], model.parameters(), strict=True):
                torch.testing.assert_close(one, p.grad)


def test_backward_refuses_a_mean():
    handle, _ = trained(ddpcore.SSGD())
    x, y = torch.randn(L, 6, 5), torch.randint(3, (L, 6))
    loss = F.cross_entropy(handle.model(x).flatten(0, 1), y.flatten())
    with pytest.raises(ValueError, match=r"losses have shape \(\): pass one loss for each of 3 learners"):
        handle.backward(loss)
    with pytest.raises(ValueError, match=r"losses have shape \(2,\)"):
        handle.backward(torch.stack([loss, loss]))


def test_backward_of_one_learner_takes_its_loss():
    handle = ddpcore.distribute(model := nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.Single())
    handle.backward(handle.model(torch.ones(4, 2)).mean())
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def test_distribute_in_inference_mode():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"inside torch.inference_mode\(\)"):
        ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2)
    ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2)  # nothing was changed


@pytest.mark.parametrize("strategy", [ddpcore.NoisySSGD(0.1, where="per_learner"), ddpcore.ADPSGD()])
@pytest.mark.parametrize("way", ["forward", "a layer"])
def test_a_forward_pass_that_no_hook_sees(strategy, way):
    """The strategy would do nothing in it."""
    strategy = type(strategy)(0.1, where="per_learner") if isinstance(strategy, ddpcore.NoisySSGD) else ddpcore.ADPSGD()
    handle, optimizer = trained(strategy)
    before = [p.detach().clone() for model in handle.models for p in model.parameters()]
    for model in handle.models:
        x = torch.ones(6, 5)
        output = model.forward(x) if way == "forward" else model[2](model[1](model[0](x)))
        output.square().mean().backward()
    with pytest.raises(RuntimeError, match="saw none in this step: call the model itself"):
        optimizer.step()
    after = [p.detach() for model in handle.models for p in model.parameters()]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("make", [ddpcore.SSGD, lambda: ddpcore.DPSGD(ddpcore.Ring()), lambda: ddpcore.LocalSGD(2)])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("way", ["before the passes", "between them", "one learner after the other", "in no_sync"])
def test_zero_grad_of_the_model_of_learner_0(make, way, vectorize, to_none):
    """The gradients of the other learners would add up from step to step."""
    handle, optimizer = trained(make(), vectorize=vectorize)
    model, x = handle.models[0], torch.ones(L, 6, 5)
    handle.model(x).square().mean(dim=(1, 2)).sum().backward()
    optimizer.step()
    before = [p.detach().clone() for one in handle.models for p in one.parameters()]
    if way != "between them":
        model.zero_grad(to_none)
    with handle.no_sync() if way == "in no_sync" else nullcontext():
        if way == "one learner after the other":
            for one, own in zip(handle.models, x, strict=True):
                one(own).square().mean().backward()
        else:
            outputs = handle.model(x)
            if way == "between them":
                model.zero_grad(to_none)
            outputs.square().mean(dim=(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="gradients of learner 0 alone were reset after the last step"):
            optimizer.step()
    assert all(map(torch.equal, before, [p.detach() for one in handle.models for p in one.parameters()]))
    optimizer.zero_grad(to_none)
    handle.model(x).square().mean(dim=(1, 2)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("make", "in_closure"),
    [
        (ddpcore.SSGD, False),
        (ddpcore.SSGD, True),
        (lambda: ddpcore.LocalSGD(2), False),
        (lambda: ddpcore.LocalSGD(2), True),
        (lambda: ddpcore.DPSGD(ddpcore.Ring()), False),
    ],
)
def test_zero_grad_of_one_model_of_few(make, in_closure):
    """Of two learners each is all others. A closure has its passes inside of the step."""
    for num, own in product((2, 3, 4), (0, 1)):
        handle, optimizer = trained(make(), learners=num)
        x = torch.randn(num, 6, 5)

        def passes(reset, handle=handle, x=x):
            reset()
            handle.backward(losses := handle.model(x).square().mean(dim=(1, 2)))
            return losses.sum()

        for reset in (optimizer.zero_grad, handle.models[own].zero_grad):
            is_refused = reset != optimizer.zero_grad
            with pytest.raises(RuntimeError, match="alone were reset") if is_refused else nullcontext():
                for _ in range(3):
                    if in_closure:
                        optimizer.step(partial(passes, reset))
                    else:
                        passes(reset)
                        optimizer.step()


def _halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad / 2


def _renew(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
        parameter.grad = torch.full_like(parameter, 0.1)  # often where the old one was


def test_gradients_of_some_learners_replaced_after_the_backward_pass():
    """By new tensors, or by None. A loop may do it to each model, and begin anew without a step."""
    for make in (ddpcore.SSGD, lambda: ddpcore.DPSGD(ddpcore.Ring()), lambda: ddpcore.LocalSGD(2)):
        for change in (_halve, _renew, nn.Module.zero_grad, lambda model: setattr(model[2].bias, "grad", None)):
            handle, optimizer = trained(make())
            before = [p.detach().clone() for one in handle.models for p in one.parameters()]
            x = torch.ones(L, 6, 5)
            handle.model(x).square().mean(dim=(1, 2)).sum().backward()
            change(handle.models[0])
            with pytest.raises(RuntimeError, match="the gradients of learner 0 alone were changed after the backward"):
                optimizer.step()
            assert all(map(torch.equal, before, [p.detach() for one in handle.models for p in one.parameters()]))
            optimizer.zero_grad()
            handle.model(x).square().mean(dim=(1, 2)).sum().backward()
            optimizer.zero_grad()
            for own, other in handle.split(torch.ones(L, 16, 5), torch.zeros(L, 16, 5), at_once=2):
                (handle.model(own).square() + handle.model(other).square()).mean(dim=(1, 2)).sum().backward()
            for one in handle.models:
                change(one)
            optimizer.step()
            with handle.no_sync():  # a step is left out, and the next one has one learner
                handle.model(x).square().mean().backward()
                optimizer.zero_grad()
                handle.models[1](x[1]).square().mean().backward()
                optimizer.step()


def _halve_one(parameter):
    parameter.grad.mul_(0.5)


class _Joined(nn.Module):
    """Joins weights in its forward pass, whose gradients are then views of one tensor."""

    def __init__(self, join):
        super().__init__()
        self.join, self.parts = join, nn.ParameterList([torch.randn(4, 5) for _ in range(3)])

    def forward(self, x):
        return F.linear(x, self.join(list(self.parts)).reshape(12, 5)).tanh()


def test_passes_add_to_gradients_that_are_views_of_one_tensor():
    """They share one version. What the loop changes for one learner alone is still found, also in a hook of it."""
    changes = {
        "clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        "first": lambda model: model.parts[0].grad.mul_(0.5),
        "last": lambda model: model.parts[2].grad.mul_(0.5),
        "hook": lambda model: None,
    }
    joins, strategies = (torch.cat, torch.stack), (ddpcore.SSGD, lambda: ddpcore.LocalSGD(99))
    for join, make, in_turn in product(joins, strategies, (False, True)):
        model = _Joined(join)
        alone = [copy.deepcopy(model) for _ in range(4)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, make(), learners=4)
        x = torch.randn(2, 4, 6, 5)

        def passes(handle=handle, x=x, in_turn=in_turn):
            for number, batches in enumerate(x):
                with handle.no_sync() if number == 0 else nullcontext():
                    outputs = (one(own) for one, own in zip(handle.models, batches, strict=True))
                    for output in outputs if in_turn else (handle.model(batches),):
                        output.square().sum().backward()

        for _ in range(3):
            optimizer.zero_grad()
            passes()
            optimizer.step()
            for one, own in zip(alone, x.unbind(1), strict=True):
                one.zero_grad()
                one(own.flatten(0, 1)).square().sum().backward()
            for own in zip(*(one.parameters() for one in alone), strict=True):
                grads = torch.stack([one.grad for one in own])
                for one, grad in zip(own, grads if make is not ddpcore.SSGD else [grads.mean(0)] * 4, strict=True):
                    one.data.sub_(grad, alpha=0.1)
        for one, plain in zip(handle.models, alone, strict=True):
            for mine, expected in zip(one.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine, expected)
        for name, change in changes.items():
            optimizer.zero_grad()
            if name == "hook" and make is ddpcore.SSGD:
                continue  # it runs before the average, which all get
            for one in handle.models[1].parameters() if name == "hook" else ():
                one.register_post_accumulate_grad_hook(_halve_one)
            passes()
            change(handle.models[1])
            with pytest.raises(RuntimeError, match="the gradients of learner 1 alone were changed after the backward"):
                optimizer.step()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("make", [ddpcore.SSGD, lambda: ddpcore.DPSGD(ddpcore.Ring())])
def test_each_learner_may_be_reset_before_its_own_pass(make, bias, to_none):
    """Or all of them at once, also of a model of one parameter."""
    model = nn.Linear(5, 3, bias=bias)
    alone = copy.deepcopy(model)  # all learners see the same batch, so each trains as a model alone
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, alone))
    handle = ddpcore.distribute(model, optimizer, make(), learners=L)
    for step in range(4):
        if step % 2:
            optimizer.zero_grad(to_none)
        for one in handle.models:
            if step % 2 == 0:
                one.zero_grad(to_none)
            one(torch.ones(6, 5)).square().mean().backward()
        optimizer.step()
        other.zero_grad()
        alone(torch.ones(6, 5)).square().mean().backward()
        other.step()
    for one in handle.models:
        for mine, expected in zip(one.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("make", [ddpcore.SSGD, lambda: ddpcore.DPSGD(ddpcore.Ring())])
def test_a_learner_may_be_measured_between_two_steps(make, vectorize, to_none):
    """With a backward pass, before all gradients are reset: it changes nothing about what follows."""
    handle, optimizer = trained(make(), vectorize=vectorize)
    alone = copy.deepcopy(handle.models[0])  # all learners see the same batch
    other = torch.optim.SGD(alone.parameters(), lr=0.1)
    x = torch.ones(L, 6, 5)
    for _ in range(3):
        optimizer.zero_grad(to_none)
        handle.model(x).square().mean(dim=(1, 2)).sum().backward()
        optimizer.step()
        with handle.no_sync():
            handle.models[0].zero_grad(to_none)
            handle.models[0](x[0]).sum().backward()
        other.zero_grad()
        alone(x[0]).square().mean().backward()
        other.step()
    for one in handle.models:
        for mine, expected in zip(one.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, expected)


def test_one_norm_of_all_learners_is_refused():
    handle, _ = trained(ddpcore.DPSGD(ddpcore.Ring()))
    handle.model(torch.ones(L, 6, 5)).sum().backward()
    with pytest.raises(RuntimeError, match=r"call handle.clip_grad_norm_\(max_norm\)"):
        nn.utils.clip_grad_norm_(handle.model.parameters(), 1.0)
    nn.utils.clip_grad_value_(handle.model.parameters(), 0.1)  # acts on each number alone
    assert len(list(handle.model.parameters())) == 4 * L
    one = ddpcore.distribute(
        model := nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.SSGD(), learners=1
    )
    one.model(torch.ones(1, 4, 2)).sum().backward()
    nn.utils.clip_grad_norm_(one.model.parameters(), 1.0)
    handle, optimizer = trained(ddpcore.SSGD())  # whose learners have equal gradients, so that nothing can see it
    handle.model(torch.ones(L, 6, 5)).sum().backward()
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)
    norm = nn.utils.get_total_norm([parameter.grad for parameter in handle.models[0].parameters()])
    assert float(norm) == pytest.approx(0.1 / L**0.5, rel=1e-4), "docs/limits.md"


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("make", [lambda: ddpcore.DPSGD(ddpcore.Ring()), lambda: ddpcore.LocalSGD(2)])
@pytest.mark.parametrize("way", ["one norm", "one norm of the optimizer's", "each", "value", "not reached", "scaled"])
def test_one_norm_of_a_list_of_all_learners(make, vectorize, way):
    """The total norm stays at the limit, and each learner has a part of it that changes."""
    handle, optimizer = trained(make(), vectorize=vectorize)
    everyone = [parameter for model in handle.models for parameter in model.parameters()]
    acts = {
        "one norm": lambda: nn.utils.clip_grad_norm_(everyone, 0.1),
        "one norm of the optimizer's": lambda: nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1),
        "each": lambda: [nn.utils.clip_grad_norm_(list(model.parameters()), 0.1) for model in handle.models],
        "value": lambda: nn.utils.clip_grad_value_(everyone, 0.01),
        "not reached": lambda: nn.utils.clip_grad_norm_(everyone, 1e3),
        "scaled": lambda: [parameter.grad.mul_(0.5) for parameter in everyone],
    }
    with pytest.raises(RuntimeError, match=r"was 0\.1 in 4 steps") if "one" in way else nullcontext():
        for _ in range(8):
            optimizer.zero_grad()
            x, y = 3 * torch.randn(L, 6, 5), torch.randint(3, (L, 6))
            handle.backward([F.cross_entropy(o, labels) for o, labels in zip(handle.model(x), y, strict=True)])
            acts[way]()
            optimizer.step()


@pytest.mark.parametrize("make", [ddpcore.SSGD, lambda: ddpcore.DPSGD(ddpcore.Ring()), lambda: ddpcore.LocalSGD(2)])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: m.eval(), "eval"),
        (lambda m: m[1].eval(), "eval"),
        (lambda m: m[2].requires_grad_(False), "req"),
    ],
)
def test_a_mode_of_the_model_of_learner_0(make, change, what):
    """A program that goes on to use its own model changes learner 0 alone."""
    handle, optimizer = trained(make())
    x = torch.ones(L, 6, 5)

    def step():
        optimizer.zero_grad()
        for one, own in zip(handle.models, x, strict=True):
            one(own).square().mean().backward()
        optimizer.step()

    step()
    change(handle.models[0])
    before = [p.detach().clone() for one in handle.models for p in one.parameters()]
    with pytest.raises(RuntimeError, match=f"{what}.* for learner 0 alone|is frozen here"):
        step()
    assert all(map(torch.equal, before, [p.detach() for one in handle.models for p in one.parameters()]))
    for one in handle.models:
        change(one)
    step()


@pytest.mark.parametrize("make", [ddpcore.SSGD, lambda: ddpcore.DPSGD(ddpcore.Ring()), lambda: ddpcore.LocalSGD(2)])
@pytest.mark.parametrize("call", [lambda m, x: m.forward(x), lambda m, x: m[2](m[1](m[0](x)))])
def test_parts_of_the_model_of_learner_0(make, call):
    """It would train alone. Parts of each model may be called, also by strategies whose average needs a call."""
    handle, optimizer = trained(make())
    before = [p.detach().clone() for p in handle.models[0].parameters()]
    call(handle.models[0], torch.ones(6, 5)).square().mean().backward()
    with pytest.raises(
        RuntimeError, match=r"only the model of learner 0 was called, or parts of it|not averaged: call"
    ):
        optimizer.step()
    assert all(map(torch.equal, before, handle.models[0].parameters()))
    if isinstance(handle.strategy, ddpcore.LocalSGD):
        for _ in range(2):
            optimizer.zero_grad()
            for one in handle.models:
                call(one, torch.ones(6, 5)).square().mean().backward()
            optimizer.step()
        assert not torch.equal(before[0], handle.models[0][0].weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ddpcore.DPSGD(ddpcore.Ring()),
        lambda: ddpcore.LocalSGD(2, outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9)),
    ],
)
@pytest.mark.parametrize("inside", [range(6), (0, 3)])
def test_steps_and_states_in_inference_mode(make, inside):
    """They have the bits of steps outside of it; what strategies keep was of a mode in which nothing else may write.

    So were states of torch's optimizers, which policies average.
    """
    ends, is_torchs = [], len(inside) == 6
    policies = ddpcore.Policies(momentum="average") if is_torchs else None
    kind = partial(torch.optim.SGD, momentum=0.9) if is_torchs else ddpcore.optim.FusedSGD
    inputs = torch.arange(L * 30.0).view(L, 6, 5) / 100
    for is_inside in (True, False):
        model = nn.Linear(5, 3)
        nn.init.constant_(model.weight, 0.1)
        nn.init.constant_(model.bias, 0.2)
        optimizer = kind(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, make(), learners=L, policies=policies)
        for step in range(6):
            optimizer.zero_grad()
            handle.model(inputs).square().mean(dim=(1, 2)).sum().backward()
            with torch.inference_mode(is_inside and step in inside):
                if step == 3:
                    handle.load_state_dict(handle.state_dict())
                optimizer.step()
        ends.append([p.detach() for model in handle.models for p in model.parameters()])
    assert all(map(torch.equal, *ends))


class Heads(nn.Module):
    """Two outputs, of which a task uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(inputs), self.other(inputs)


def test_an_output_in_no_loss_has_gradients_of_zero() -> None:
    """So its layers step. With each of ``handle.models``, as on a rank, they have none."""
    for joint in (True, False):
        torch.manual_seed(0)
        model = Heads()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(9), learners=2)
        inputs, before = torch.randn(2, 4, 3), handle.models[0].other.weight.detach().clone()
        each = [own(x) for own, x in zip(handle.models, inputs, strict=True)]
        outputs = list(zip(*handle.model(inputs), strict=True)) if joint else each
        handle.backward([both[task].square().mean() for task, both in enumerate(outputs)])
        optimizer.step()
        assert torch.equal(handle.models[0].other.weight, before) != joint
