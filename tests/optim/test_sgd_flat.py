"""A bound ``FusedSGD`` takes the same steps as an unbound one, bit for bit; with a mixture, it mixes first."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore import ops
from ddpcore.optim import FusedSGD
from ddpcore.parameters.flat import FlatParameters

RULES: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.1},
    "dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}
RULE = RULES["dampening"]


def small_net(device: torch.device | str = "cpu", layout: torch.memory_format = torch.contiguous_format) -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    net.append(nn.Linear(64, 5))
    return net.to(device=device, memory_format=layout)


def gradients_of(net: nn.Module) -> list[Tensor]:
    """Random gradients with the parameters' strides, identical for both sides."""
    return [torch.randn(p.shape).to(p.device, p.dtype) for p in net.parameters()]


def step_together(optimizers: list[torch.optim.Optimizer], nets: list[nn.Module], num_steps: int) -> None:
    for _ in range(num_steps):
        gradients = gradients_of(nets[0])
        for optimizer, net in zip(optimizers, nets, strict=True):
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
            optimizer.step()


def assert_same(left: nn.Module, right: nn.Module) -> None:
    for (name, one), two in zip(left.named_parameters(), right.parameters(), strict=True):
        assert torch.equal(one, two), f"{name} differs"


def bound_pair(device: torch.device, rule: dict[str, Any]) -> tuple[list[nn.Module], list[FusedSGD], FlatParameters]:
    """A net stepped as a list, and its copy in a flat buffer with a bound optimizer, in two groups that interleave."""
    nets = [small_net(device, torch.channels_last)]
    nets.append(copy.deepcopy(nets[0]))
    flat = FlatParameters([nets[1].named_parameters()])
    groups = [[list(net.parameters())[start::2] for start in (0, 1)] for net in nets]
    optimizers = [FusedSGD([{"params": even}, {"params": odd, "lr": 0.03}], **rule) for even, odd in groups]
    optimizers[1].bind(flat)
    return nets, optimizers, flat


@pytest.mark.parametrize("rule", RULES)
def test_bound_to_a_flat_buffer(rule, device):
    nets, optimizers, flat = bound_pair(device, RULES[rule])
    step_together(optimizers, nets, num_steps=3)
    assert_same(*nets)
    address = flat.param_LP.data_ptr()
    assert all(address <= p.data_ptr() < address + flat.param_LP.nbytes for p in nets[1].parameters())
    if RULES[rule].get("momentum"):
        buffers = [
            [optimizer.state[p]["momentum_buffer"] for p in net.parameters()]
            for optimizer, net in zip(optimizers, nets, strict=True)
        ]
        assert all(torch.equal(one, two) for one, two in zip(*buffers, strict=True))


def test_bound_after_steps_and_with_gaps(device):
    """Momentum made before ``bind`` moves into the buffer; steps with missing gradients fall back to the list."""
    nets, optimizers, _ = bound_pair(device, RULE)
    unbound = FusedSGD([group.copy() for group in optimizers[1].param_groups])
    step_together([optimizers[0], unbound], nets, num_steps=2)
    optimizers[1].load_state_dict(unbound.state_dict())
    step_together(optimizers, nets, num_steps=2)
    assert_same(*nets)
    for missing in (0, 3, 5):
        gradients = gradients_of(nets[0])
        for net, optimizer in zip(nets, optimizers, strict=True):
            for index, (parameter, gradient) in enumerate(zip(net.parameters(), gradients, strict=True)):
                parameter.grad = None if index == missing else torch.empty_like(parameter).copy_(gradient)
            optimizer.step()
    step_together(optimizers, nets, num_steps=1)
    assert_same(*nets)


def test_bound_and_first_gradients_at_different_steps(device):
    nets, optimizers, _ = bound_pair(device, RULE)
    for step in range(4):
        gradients = gradients_of(nets[0])
        for net, optimizer in zip(nets, optimizers, strict=True):
            for index, (parameter, gradient) in enumerate(zip(net.parameters(), gradients, strict=True)):
                parameter.grad = None if index > step else torch.empty_like(parameter).copy_(gradient)
            optimizer.step()
    step_together(optimizers, nets, num_steps=2)
    assert_same(*nets)


def test_bound_and_reordered(device):
    nets, optimizers, flat = bound_pair(device, RULE)
    step_together(optimizers, nets, num_steps=2)
    flat.reorder(list(reversed(range(len(flat.segments)))))
    step_together(optimizers, nets, num_steps=2)
    assert_same(*nets)


@pytest.mark.parametrize("with_gap", [False, True], ids=["all-gradients", "one-missing"])
@pytest.mark.parametrize("noise", [None, ops.Noise(0.5, seed=1, step=2, first=3)], ids=["silent", "noise"])
@pytest.mark.parametrize("rule", ["plain", "dampening"])
def test_an_average_with_the_step(rule, noise, with_gap, device):
    """The noise of a column is the same for any number of pieces into which the groups cut the flat buffer."""
    nets, optimizers, flat = bound_pair(device, RULES[rule])
    step_together(optimizers, nets, num_steps=1)
    peers = [torch.randn(flat.numel).to(device) for _ in range(2)]
    mixture = ops.Mixture(peers, 0.5, [0.3, 0.2], noise)
    expected = flat.param_LP[0].clone()
    ops.mix_(expected, peers, 0.5, [0.3, 0.2], noise)
    optimizers[1]._weight_step.average(mixture)
    with torch.no_grad():
        for parameter, mixed in zip(flat.parameters, flat.views_of(expected[None]), strict=True):
            index = [id(p) for p in nets[1].parameters()].index(id(parameter))
            list(nets[0].parameters())[index].copy_(mixed)
    gradients = gradients_of(nets[0])
    for net, optimizer in zip(nets, optimizers, strict=True):
        for index, (parameter, gradient) in enumerate(zip(net.parameters(), gradients, strict=True)):
            parameter.grad = None if with_gap and index == 3 else torch.empty_like(parameter).copy_(gradient)
        optimizer.step()
    assert_same(*nets)
    step_together(optimizers, nets, num_steps=1)  # a mixture is used for one step
    assert_same(*nets)


@pytest.mark.parametrize("missing_of", [(0, 1, 2), (1,)])
def test_bound_to_the_rows_of_several_learners(device, missing_of):
    """Three virtual learners in one buffer step like three optimizers, also where gradients are missing."""
    nets = [small_net(device) for _ in range(3)]
    rows = [copy.deepcopy(net) for net in nets]
    flat = FlatParameters([row.named_parameters() for row in rows])
    together = FusedSGD([p for row in rows for p in row.parameters()], **RULE)
    together.bind(flat)
    alone = [FusedSGD(net.parameters(), **RULE) for net in nets]
    for step in range(4):
        for learner, (row, net) in enumerate(zip(rows, nets, strict=True)):
            for index, (ours, theirs) in enumerate(zip(row.parameters(), net.parameters(), strict=True)):
                missing = step == 2 and index == 1 and learner in missing_of
                ours.grad = None if missing else torch.randn(ours.shape).to(device)
                theirs.grad = None if missing else ours.grad.clone()
        for optimizer in (together, *alone):
            optimizer.step()
    for row, net in zip(rows, nets, strict=True):
        assert_same(row, net)


@pytest.mark.parametrize("by_key", [False, True])
def test_states_that_the_program_exchanges(by_key: bool) -> None:
    """Two parameters get each other's momentum, whether their values or their keys change places."""
    results = []
    for distributed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        if distributed:
            ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(2), learners=1)
        for step in range(6):
            optimizer.zero_grad()
            model(torch.ones(5, 4)).square().sum().backward()
            if step == 3:
                first, second = optimizer.state
                own, other = optimizer.state.pop(first), optimizer.state.pop(second)
                pairs = [(second, own), (first, other)] if by_key else [(first, other), (second, own)]
                optimizer.state.update(pairs)
            optimizer.step()
        results.append([weight.detach().clone() for weight in model.parameters()])
    assert all(map(torch.equal, *results))
