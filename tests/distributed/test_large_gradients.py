"""Large gradients of several learners stay where autograd left them: the bits are those of plain loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcore
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
    assert inside == (strategy == "ssgd"), "a large gradient is not copied"
    monkeypatch.setattr(weight_step, "LARGE", 2**62)
    monkeypatch.setattr("ddpcore.distributed.watch.LARGE", 2**62)
    copied, inside = trained(strategy, "sgd")
    assert inside
    for ours, theirs in zip(found, copied, strict=True):
        assert torch.equal(ours, theirs)
