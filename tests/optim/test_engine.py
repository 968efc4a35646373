"""Flat buffers, virtual learners and compiled steps give the bits of plain lists in eager mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore.optim import FusedLAMB, FusedLARS, FusedSGD, TrustRatio
from ddpcore.parameters.flat import FlatParameters

MAKES: dict[str, Any] = {
    "sgd": lambda p, **more: FusedSGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01, **more),
    "lars": lambda p, **more: FusedLARS(p, lr=0.1, weight_decay=0.01, trust_coefficient=0.5, **more),
    "lamb": lambda p, **more: FusedLAMB(p, lr=0.01, weight_decay=0.01, **more),
}
every = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
L = 4


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def give(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def assert_same(left: nn.Module, right: nn.Module) -> None:
    assert all(torch.equal(one, two) for one, two in zip(left.parameters(), right.parameters(), strict=True))


@pytest.mark.parametrize("clip", [None, 0.5])
@every
def test_a_list_and_a_flat_buffer(make, clip):
    models = [net(), net()]
    flat = FlatParameters([models[1].named_parameters()])
    optimizers = [make(model.parameters(), max_grad_norm=clip) for model in models]
    optimizers[1].bind(flat)
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            give(model, step)
            optimizer.step()
    assert_same(*models)
    if make is not MAKES["sgd"]:
        assert optimizers[0].trust_ratios() == optimizers[1].trust_ratios()


@pytest.mark.parametrize("clip", [None, 0.01])
@every
def test_four_virtual_learners_are_four_learners(make, clip):
    """Each has its own weights, norms, ratios and, with max_grad_norm, its own norm of all its gradients.

    They are stepped as ``distribute`` leaves them to the optimizer, with other gradients for each learner.
    """
    alone = [copy.deepcopy(model) for model in [net()] * L]
    rows = [copy.deepcopy(model) for model in alone]
    flat = FlatParameters([row.named_parameters() for row in rows])
    together = make([p for row in rows for p in row.parameters()], max_grad_norm=clip)
    together.bind(flat)
    optimizers = [make(model.parameters(), max_grad_norm=clip) for model in alone]
    for step in range(4):
        for index, (model, row) in enumerate(zip(alone, rows, strict=True)):
            give(model, 10 * step + index)
            give(row, 10 * step + index)
        for optimizer in (together, *optimizers):
            optimizer.step()
    for optimizer, model, row in zip(optimizers, alone, rows, strict=True):
        for ours, theirs in zip(row.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            assert optimizer.state[theirs]["step"] == 4
            assert together.state[ours]["step"] == 4
    if make is not MAKES["sgd"]:
        reported = together.trust_ratios()
        for name in optimizers[0].trust_ratios():
            assert reported[name] == [optimizer.trust_ratios()[name] for optimizer in optimizers]


@pytest.mark.parametrize("clip", [None, 0.05])
@every
def test_synchronous_learners_are_one_learner_with_the_average_gradient(make, clip):
    """``distribute`` with SSGD and a clip: all learners hold one learner's weights, whose gradient is the mean."""
    model, single = net(), net()
    optimizer, alone = make(model.parameters(), max_grad_norm=clip), make(single.parameters(), max_grad_norm=clip)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=L)
    for step in range(4):
        inputs = torch.randn(L, 8, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        sum(row.square().mean() for row in handle.model(inputs)).backward()
        for *rows, param in zip(*(one.parameters() for one in handle.models), single.parameters(), strict=True):
            assert all(torch.equal(rows[0].grad, row.grad) for row in rows)
            param.grad = rows[0].grad.clone()
        optimizer.step()
        alone.step()
    for *rows, param in zip(*(one.parameters() for one in handle.models), single.parameters(), strict=True):
        assert all(torch.equal(row, param) for row in rows)
    if make is not MAKES["sgd"]:
        rows = optimizer.trust_ratios()[0]
        assert len(rows) == L
        assert all(isinstance(row, TrustRatio) and row == rows[0] for row in rows)


def breaks_of(make: Any) -> tuple[int, list[Tensor], list[Tensor]]:
    """Graph breaks of a compiled training step, and the weights after four of them, compiled and not."""
    torch._dynamo.reset()
    models = [net(), net()]
    ends = []
    for model, compiled in zip(models, (True, False), strict=True):
        optimizer = make(model.parameters())

        def train(inputs: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            model(inputs).square().mean().backward()
            optimizer.step()

        torch._dynamo.utils.counters.clear()
        function = torch.compile(train, backend="eager") if compiled else train
        for number in range(4):
            model.zero_grad()
            function(torch.randn(8, 6, generator=torch.Generator().manual_seed(number)))
        if compiled:
            breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        ends.append([param.detach() for param in model.parameters()])
    return breaks, *ends


@pytest.mark.slow
@every
def test_compiled_training_has_the_bits_of_eager_training(make):
    """With no more graph breaks than torch's own optimizer. Others compile the step alone: test_same_bits.py."""
    breaks, compiled, eager = breaks_of(make)
    assert all(map(torch.equal, compiled, eager))
    theirs = torch.optim.AdamW if make is MAKES["lamb"] else lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
    assert breaks <= breaks_of(theirs)[0]
