"""Large gradients of several learners stay where autograd left them: the bits are those of plain loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore.distributed.handle import Observer
from ddpcore.optim import FusedAdamW, FusedLARS, FusedSGD, weight_step
from ddpcore.parameters.flat import LARGE

N, STEPS, WIDTH = 3, 3, 256
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda params: FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: FusedAdamW(params, lr=0.01),
    "lars": lambda params: FusedLARS(params, lr=0.1, momentum=0.9),
    "torch": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}
STRATEGIES: dict[str, Callable[[], ddpcore.Strategy]] = {
    "local_sgd": lambda: ddpcore.LocalSGD(2),
    "dpsgd": lambda: ddpcore.DPSGD(ddpcore.Ring()),
    "ssgd": ddpcore.SSGD,
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(N, 5, 8, generator=generator) for _ in range(STEPS)]


def trained(strategy: str, optimizer: str) -> tuple[list[Tensor], bool]:
    """All weights, and whether a large gradient was in the flat buffer in the last step."""
    module = model()
    opt = OPTIMIZERS[optimizer](module.parameters())
    handle = ddpcore.distribute(module, opt, STRATEGIES[strategy](), learners=N)
    for inputs in batches():
        opt.zero_grad()
        handle.backward(handle.model(inputs).square().mean((1, 2)))
        opt.step()
    flat = handle.learner.flat
    large = [index for index, p in enumerate(flat.parameters) if p.numel() >= LARGE]
    assert len(large) == N
    inside = any(flat.parameters[index].grad is flat.grad_views[index] for index in large)
    return [parameter.detach().clone() for one in handle.models for parameter in one.parameters()], inside


def plain(strategy: str, optimizer: str) -> list[Tensor]:
    """Models in a loop, each with an optimizer of its own."""
    models = [copy.deepcopy(model()) for _ in range(N)]
    optimizers = [OPTIMIZERS[optimizer](one.parameters()) for one in models]
    for step, inputs in enumerate(batches()):
        for one, opt, x in zip(models, optimizers, inputs, strict=True):
            opt.zero_grad()
            one(x).square().mean((0, 1)).backward()
        if strategy == "ssgd":
            for rows in zip(*(one.parameters() for one in models), strict=True):
                mean = sum(row.grad for row in rows) / N
                for row in rows:
                    row.grad.copy_(mean)
        for opt in optimizers:
            opt.step()
        if strategy == "local_sgd" and step % 2 == 1:
            for rows in zip(*(one.parameters() for one in models), strict=True):
                mean = sum(row.data for row in rows) / N
                for row in rows:
                    row.data.copy_(mean)
    return [parameter.detach() for one in models for parameter in one.parameters()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["local_sgd", "ssgd"])
def test_learners_have_the_bits_of_plain_loops(strategy: str, optimizer: str) -> None:
    found, _ = trained(strategy, optimizer)
    for ours, theirs in zip(found, plain(strategy, optimizer), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_stay_give_the_bits_of_copied_ones(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, inside = trained(strategy, "sgd")
    assert not inside, "a large gradient is not copied"
    monkeypatch.setattr(weight_step, "LARGE", 2**62)
    monkeypatch.setattr("ddpcore.distributed.watch.LARGE", 2**62)
    monkeypatch.setattr("ddpcore.parameters.buckets.LARGE", 2**62)
    copied, inside = trained(strategy, "sgd")
    assert inside
    for ours, theirs in zip(found, copied, strict=True):
        assert torch.equal(ours, theirs)


def averaging() -> tuple[Any, torch.optim.Optimizer]:
    module = model()
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    return ddpcore.distribute(module, optimizer, ddpcore.SSGD(), learners=N), optimizer


def backward(handle: Any, inputs: Tensor) -> None:
    handle.backward(handle.model(inputs).square().mean((1, 2)))


def large(handle: Any) -> list[nn.Parameter]:
    return [parameter for parameter in handle.learner.flat.parameters if parameter.numel() >= LARGE]


def test_a_gradient_that_the_program_holds_is_not_overwritten() -> None:
    """By a name, or by another tensor in its memory."""
    expected, own, held = [copy.deepcopy(model()) for _ in range(N)], [], {}
    for one, x in zip(expected, batches()[0], strict=True):
        one(x).square().mean((0, 1)).backward()
        own += [p.grad for p in one.parameters() if p.grad is not None and p.numel() >= LARGE]
    handle, _ = averaging()
    holds = (lambda p: {id(p): p.grad}, lambda p: {id(p): p.grad.detach()}, lambda p: {id(p): p.grad[1:]})
    for parameter, hold in zip(large(handle), holds, strict=True):
        parameter.register_post_accumulate_grad_hook(lambda p, hold=hold: held.update(hold(p)))
    backward(handle, batches()[0])
    for parameter, gradient in zip(large(handle), own, strict=True):
        kept = held[id(parameter)]
        assert torch.equal(kept, gradient[-len(kept) :])
        assert torch.equal(parameter.grad, (own[0] + own[1] + own[2]) / N)


def test_an_average_in_place_is_known_as_one() -> None:
    """A step may repeat it, one learner's may not be changed, and no other gradient takes its place."""
    handle, optimizer = averaging()
    backward(handle, batches()[0])
    optimizer.step()
    optimizer.step()
    first = large(handle)[0]
    first.grad = first.grad.clone()
    with pytest.raises(RuntimeError, match="without a backward pass"):
        optimizer.step()
    backward(handle, batches()[1])
    large(handle)[1].grad.mul_(2.0)
    with pytest.raises(RuntimeError, match="learner 1 alone"):
        optimizer.step()
    optimizer.zero_grad()
    inputs = batches()[2]
    inputs[2, 0, 0] = torch.inf
    backward(handle, inputs)
    with pytest.raises(ddpcore.NonFiniteError, match=r"learner 2: the gradient of 0\.weight"):
        optimizer.step()
    optimizer.zero_grad()
    backward(handle, batches()[2])
    large(handle)[0].grad.data[3, 3] = torch.nan  # no version shows it
    with pytest.raises(ddpcore.NonFiniteError, match=r"the gradient of 2\.weight"):
        optimizer.step()


def test_an_observer_sees_large_gradients_and_changes_nothing() -> None:
    seen: list[int] = []

    class Sees(Observer):
        def bucket_ready(self, learner: Any, columns: Tensor) -> None:
            seen.append(columns.shape[1])

    found = []
    for observers in ([], [Sees()]):
        handle, optimizer = averaging()
        handle.observers += observers
        for inputs in batches():
            backward(handle, inputs)
            backward(handle, inputs)  # it adds to the average
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        found.append((handle.comm.bytes_sent, handle.learner.flat.param_LP.clone()))
    assert sum(seen) == 2 * STEPS * handle.learner.flat.numel
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
