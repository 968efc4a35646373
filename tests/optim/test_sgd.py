"""``FusedSGD`` is ``torch.optim.SGD``: the same steps to a few ULPs, the same state, the same errors."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpcore.optim import FusedSGD

RULES: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.1},
    "decay": {"lr": 0.1, "weight_decay": 0.01},
    "momentum": {"lr": 0.1, "momentum": 0.9},
    "dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "maximize": {"lr": 0.01, "momentum": 0.5, "maximize": True},
}
RULE = RULES["dampening"]
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def small_net(device: torch.device | str = "cpu", layout: torch.memory_format = torch.contiguous_format) -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    net.append(nn.Linear(64, 5))
    return net.to(device=device, memory_format=layout)


def gradients_of(net: nn.Module) -> list[Tensor]:
    """Random gradients with the parameters' strides; both sides must get identical ones."""
    return [torch.randn(p.shape).to(p.device, p.dtype) for p in net.parameters()]


def step_together(optimizers: list[torch.optim.Optimizer], nets: list[nn.Module], num_steps: int) -> None:
    for _ in range(num_steps):
        gradients = gradients_of(nets[0])
        for optimizer, net in zip(optimizers, nets, strict=True):
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
            optimizer.step()


def assert_ulps(left: nn.Module, right: nn.Module, ulps: float = 8.0) -> None:
    """Within some ULPs of the largest value each parameter may have had on its way (about 4)."""
    for (name, one), two in zip(left.named_parameters(), right.parameters(), strict=True):
        error = (one.detach().double() - two.detach().double()).abs().max().item()
        scale = max(4.0, two.detach().abs().max().item())
        assert error <= ulps * torch.finfo(one.dtype).eps * scale, f"{name} is off by {error:.3e}"


def assert_same(left: nn.Module, right: nn.Module) -> None:
    for (name, one), two in zip(left.named_parameters(), right.parameters(), strict=True):
        assert torch.equal(one, two), f"{name} differs"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_ten_steps_of_torch(rule, layout, device):
    ours = small_net(device, layout)
    theirs = copy.deepcopy(ours)
    optimizers = [
        FusedSGD(ours.parameters(), **RULES[rule]),
        torch.optim.SGD(theirs.parameters(), **RULES[rule]),
    ]
    step_together(optimizers, [ours, theirs], num_steps=10)
    assert_ulps(ours, theirs)
    strides = [parameter.stride() for parameter in ours.parameters()]
    assert strides == [parameter.stride() for parameter in theirs.parameters()], "a step keeps the layout"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ten_steps_of_training(layout, device):
    """Through a real loss and backward pass: autograd chooses the strides of the gradients."""
    ours = small_net(device, layout)
    theirs = copy.deepcopy(ours)
    rule = {**RULE, "lr": 0.01}
    images = torch.randn(16, 3, 8, 8).to(device).to(memory_format=layout)
    labels = torch.randint(5, (16,)).to(device)
    losses: list[list[float]] = [[], []]
    sides = [(ours, FusedSGD(ours.parameters(), **rule)), (theirs, torch.optim.SGD(theirs.parameters(), **rule))]
    for _ in range(10):
        for side, (net, optimizer) in enumerate(sides):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            losses[side].append(loss.item())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-6)
    assert losses[0][-1] < losses[0][0]


def test_gradients_of_other_strides(device):
    """A gradient may have another memory layout than its parameter."""
    ours = small_net(device, torch.channels_last)
    theirs = copy.deepcopy(ours)
    optimizers = [FusedSGD(ours.parameters(), **RULE), FusedSGD(theirs.parameters(), **RULE)]
    for _ in range(2):
        for one, two, gradient in zip(ours.parameters(), theirs.parameters(), gradients_of(ours), strict=True):
            one.grad, two.grad = gradient.contiguous(), torch.empty_like(two).copy_(gradient)
        assert ours[0].weight.grad.stride() != ours[0].weight.stride()
        for optimizer in optimizers:
            optimizer.step()
    assert_same(ours, theirs)


def test_groups(device):
    ours = small_net(device)
    theirs = copy.deepcopy(ours)

    def groups(net: nn.Module) -> list[dict[str, Any]]:
        parameters = list(net.parameters())
        return [
            {"params": parameters[:2], "lr": 0.3, "momentum": 0.0},
            {"params": parameters[2:5], "weight_decay": 0.1, "nesterov": True, "dampening": 0.0},
            {"params": parameters[5:], "maximize": True},
        ]

    optimizers = [FusedSGD(groups(ours), **RULE), torch.optim.SGD(groups(theirs), **RULE)]
    step_together(optimizers, [ours, theirs], num_steps=5)
    assert_ulps(ours, theirs)
    ours.add_module("late", nn.Linear(3, 3).to(device))
    theirs.add_module("late", copy.deepcopy(ours.late))
    for optimizer, net in zip(optimizers, (ours, theirs), strict=True):
        optimizer.add_param_group({"params": list(net.late.parameters()), "lr": 0.02})
    step_together(optimizers, [ours, theirs], num_steps=5)
    assert_ulps(ours, theirs)


@pytest.mark.parametrize("rule", ["plain", "dampening", "nesterov"])
@pytest.mark.parametrize(("before", "after"), [(FusedSGD, torch.optim.SGD), (torch.optim.SGD, FusedSGD)])
def test_state_goes_to_and_from_torch(before, after, rule, device):
    straight = small_net(device, torch.channels_last)
    crossed = copy.deepcopy(straight)
    optimizers = [before(net.parameters(), **RULES[rule]) for net in (straight, crossed)]
    step_together(optimizers, [straight, crossed], num_steps=3)
    other = after(crossed.parameters(), lr=77.0)
    other.load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    assert other.param_groups[0]["lr"] == 0.1
    step_together([optimizers[0], other], [straight, crossed], num_steps=3)
    assert_ulps(straight, crossed)
    # and back again
    back = before(crossed.parameters(), lr=77.0)
    back.load_state_dict(other.state_dict())
    step_together([optimizers[0], back], [straight, crossed], num_steps=2)
    assert_ulps(straight, crossed)


def test_state_goes_to_itself(tmp_path, device):
    straight = small_net(device)
    resumed = copy.deepcopy(straight)
    optimizers = [FusedSGD(net.parameters(), **RULE) for net in (straight, resumed)]
    step_together(optimizers, [straight, resumed], num_steps=3)
    torch.save(optimizers[1].state_dict(), tmp_path / "optimizer.pt")
    again = FusedSGD(resumed.parameters(), lr=77.0)
    again.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    step_together([optimizers[0], again], [straight, resumed], num_steps=3)
    assert_same(straight, resumed)


def test_momentum_of_torch_with_other_strides():
    """torch's buffer takes the strides of the first gradient, which need not be those of the parameter."""
    weight = nn.Parameter(torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last))
    theirs = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.randn(4, 3, 3, 3)
    theirs.step()
    assert theirs.state[weight]["momentum_buffer"].stride() != weight.stride()
    other = nn.Parameter(weight.detach().clone(memory_format=torch.preserve_format))
    ours = FusedSGD([other], lr=0.1, momentum=0.9)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for _ in range(2):
        other.grad = weight.grad.clone()
        theirs.step()
        ours.step()
    torch.testing.assert_close(other, weight, rtol=1e-6, atol=1e-6)


def test_copies_step_on(device):
    """deepcopy and pickle work as for torch's optimizers."""
    net = small_net(device)
    optimizer = FusedSGD(net.parameters(), **RULE)
    step_together([optimizer], [net], num_steps=1)
    copied_net, copied = copy.deepcopy((net, optimizer))
    step_together([optimizer, copied], [net, copied_net], num_steps=2)
    assert_same(net, copied_net)


def test_some_gradients_are_none(device):
    """A parameter without a gradient does not change, and its first step is undampened at any time."""
    ours = small_net(device)
    theirs = copy.deepcopy(ours)
    optimizers = [FusedSGD(ours.parameters(), **RULE), torch.optim.SGD(theirs.parameters(), **RULE)]
    for step in range(6):
        gradients = gradients_of(ours)
        for net in (ours, theirs):
            for index, (parameter, gradient) in enumerate(zip(net.parameters(), gradients, strict=True)):
                parameter.grad = None if (index + step) % 3 == 0 or (index == 2 and step < 3) else gradient.clone()
        before = [parameter.detach().clone() for parameter in ours.parameters()]
        for optimizer in optimizers:
            optimizer.step()
        for parameter, old in zip(ours.parameters(), before, strict=True):
            assert parameter.grad is not None or torch.equal(parameter, old)
    assert_ulps(ours, theirs)
    for parameter in ours.parameters():
        parameter.grad = None
    before = [parameter.detach().clone() for parameter in ours.parameters()]
    optimizers[0].step()
    assert all(torch.equal(parameter, old) for parameter, old in zip(ours.parameters(), before, strict=True))


def test_no_momentum_keeps_no_state(device):
    net = small_net(device)
    optimizer = FusedSGD(net.parameters(), lr=0.1)
    step_together([optimizer], [net], num_steps=2)
    assert not any(optimizer.state_dict()["state"].values())


def test_closure():
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = FusedSGD([weight], lr=0.25)

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 9.0
    assert weight.item() == 1.5
    assert optimizer.step() is None


def test_schedulers_and_momentum_changes(device):
    ours = small_net(device)
    theirs = copy.deepcopy(ours)
    optimizers = [FusedSGD(ours.parameters(), **RULE), torch.optim.SGD(theirs.parameters(), **RULE)]
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10) for optimizer in optimizers
    ]  # moves the momentum too
    for _ in range(9):
        step_together(optimizers, [ours, theirs], num_steps=1)
        for scheduler in schedulers:
            scheduler.step()
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
    assert_ulps(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, device):
    """torch rounds each intermediate to the storage type, so the two agree only within that rounding."""
    ours = small_net(device).to(dtype)
    theirs = copy.deepcopy(ours)
    optimizers = [FusedSGD(ours.parameters(), **RULE), torch.optim.SGD(theirs.parameters(), **RULE)]
    step_together(optimizers, [ours, theirs], num_steps=10)
    assert_ulps(ours, theirs, ulps=20.0)
    assert all(state["momentum_buffer"].dtype == dtype for state in optimizers[0].state.values())


def test_two_dtypes_in_one_group(device):
    ours = small_net(device)
    ours[5].to(torch.bfloat16)
    theirs = copy.deepcopy(ours)
    optimizers = [FusedSGD(ours.parameters(), **RULE), torch.optim.SGD(theirs.parameters(), **RULE)]
    step_together(optimizers, [ours, theirs], num_steps=2)
    assert_ulps(ours, theirs, ulps=20.0)  # torch rounds each term of a bf16 step, ours once


def test_learning_rate_as_a_tensor():
    ours, theirs = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    optimizers = [FusedSGD([ours], lr=torch.tensor(0.1)), torch.optim.SGD([theirs], lr=torch.tensor(0.1))]
    for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
        parameter.grad = torch.ones(5)
        optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_sparse_gradients_are_an_error():
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = FusedSGD(table.parameters(), lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="needs dense gradients"):
        optimizer.step()


@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay"])
@pytest.mark.parametrize(("value", "must"), [(-0.1, "at least 0"), (math.nan, "a finite"), (math.inf, "a finite")])
def test_bad_numbers(name, value, must):
    with pytest.raises(ValueError, match=f"{name} is {value}: it must be {must}"):
        FusedSGD([nn.Parameter(torch.zeros(1))], **{"lr": 0.1, name: value})


@pytest.mark.parametrize("rule", [{"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}])
def test_nesterov_needs_undampened_momentum(rule):
    with pytest.raises(ValueError, match=r"nesterov is True with momentum .* and dampening .*: it needs"):
        FusedSGD([nn.Parameter(torch.zeros(1))], lr=0.1, nesterov=True, **rule)


def test_float64_is_torchs():
    """No kernel supports it; plain torch computes it in float64."""
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64)) for _ in range(2))
    optimizers = [FusedSGD([ours], **RULE), torch.optim.SGD([theirs], **RULE)]
    for _ in range(5):
        ours.grad = torch.randn(7, dtype=torch.float64)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=8 * torch.finfo(torch.float64).eps)
