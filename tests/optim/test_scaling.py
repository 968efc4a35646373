"""``torch.amp.GradScaler`` drives the fused optimizers, and clipping inside of a step is clipping by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedOptimizer, FusedSGD

MAKES: dict[str, Any] = {
    "sgd": lambda p, **more: FusedSGD(p, lr=0.1, momentum=0.9, dampening=0.4, weight_decay=0.01, **more),
    "adamw": lambda p, **more: FusedAdamW(p, lr=0.01, weight_decay=0.01, **more),
    "lars": lambda p, **more: FusedLARS(p, lr=0.1, dampening=0.4, weight_decay=0.01, trust_coefficient=0.5, **more),
    "lamb": lambda p, **more: FusedLAMB(p, lr=0.01, weight_decay=0.01, **more),
}
every = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def scaler(device: torch.device | str = "cpu") -> torch.amp.GradScaler:
    """A scale that is a power of two: then scaled gradients have the bits of unscaled ones."""
    return torch.amp.GradScaler(torch.device(device).type, init_scale=2.0**10, growth_interval=1000)


def backward(model: nn.Module, step: int, with_scaler: torch.amp.GradScaler | None = None) -> None:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 6, generator=generator).to(next(model.parameters()).device)
    loss = model(inputs).square().mean()
    (loss if with_scaler is None else with_scaler.scale(loss)).backward()


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def assert_same(left: nn.Module, right: nn.Module) -> None:
    assert all(torch.equal(one, two) for one, two in zip(left.parameters(), right.parameters(), strict=True))


def buffers(optimizer: FusedOptimizer) -> list[Tensor]:
    return [value.clone() for state in optimizer.state.values() for value in state.values()]


@every
def test_a_scaled_run_is_the_unscaled_run(make, device):
    models = [net().to(device), net().to(device)]
    optimizers = [make(model.parameters()) for model in models]
    with_scaler = scaler(device)
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(models[0], step)
        optimizers[0].step()
        backward(models[1], step, with_scaler)
        with_scaler.step(optimizers[1])
        with_scaler.update()
        grad = models[1][0].weight.grad
        assert torch.equal(grad, models[0][0].weight.grad * 2.0**10), "the step leaves .grad as it is"
    assert_same(*models)
    assert not hasattr(optimizers[1], "grad_scale") or optimizers[1].grad_scale is None


@pytest.mark.parametrize("overflow", [0, 2], ids=["first step", "third step"])
@every
def test_an_overflow_writes_nothing_and_is_no_step(make, overflow, device):
    """After a skipped first step, the next one is a first step: undampened, with the first bias correction."""
    models = [net().to(device), net().to(device)]
    optimizers = [make(model.parameters()) for model in models]
    with_scaler = scaler(device)
    for step in range(6):
        if step != overflow:
            optimizers[0].zero_grad()
            backward(models[0], step)
            optimizers[0].step()
        optimizers[1].zero_grad()
        backward(models[1], step, with_scaler)
        before = weights(models[1]), buffers(optimizers[1])
        if step == overflow:
            models[1][2].bias.grad[1] = torch.inf
        with_scaler.step(optimizers[1])
        with_scaler.update()
        if step == overflow:
            assert all(map(torch.equal, before[0], weights(models[1])))
            now = buffers(optimizers[1])
            assert all(map(torch.equal, before[1], now)) if before[1] else not any(map(torch.count_nonzero, now))
    assert with_scaler.get_scale() == 2.0**9
    assert_same(*models)
    assert all(state["step"].item() == 5 for state in optimizers[1].state.values())


@pytest.mark.parametrize("make", [MAKES["sgd"]], ids=["sgd"])
def test_torch_after_an_overflow_at_the_first_step(make):
    """torch's own SGD, which the scaler does not call at all then, is the standard."""
    models = [net(), net()]
    optimizers = [make(models[0].parameters())]
    optimizers.append(torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9, dampening=0.4, weight_decay=0.01))
    scalers = [scaler(), scaler()]
    for step in range(4):
        for model, optimizer, with_scaler in zip(models, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            backward(model, step, with_scaler)
            if step == 0:
                model[0].weight.grad[0, 0] = torch.nan
            with_scaler.step(optimizer)
            with_scaler.update()
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):  # 3 steps of some 5 roundings
        torch.testing.assert_close(one, two, rtol=0, atol=15 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("scaled", [False, True])
@every
def test_clipping_in_the_step_is_clipping_by_hand(make, scaled, device):
    """torch rounds each clipped gradient to fp32 where ours is multiplied once: an ULP of the gradient a step."""
    models = [net().to(device).double(), net().to(device).double()]  # in float64 an ULP cannot hide a wrong rule
    optimizers = [make(models[0].parameters(), max_grad_norm=0.05), make(models[1].parameters())]
    scalers = [scaler(device), scaler(device)]
    for step in range(5):
        for model, optimizer, with_scaler in zip(models, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(device).double())
            loss = loss.square().mean()
            (with_scaler.scale(loss) if scaled else loss).backward()
            before = copy.deepcopy(model[0].weight.grad)
            if model is models[1]:
                if scaled:
                    with_scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                assert norm > 0.1, "else nothing is clipped"
            if scaled:
                with_scaler.step(optimizer)
                with_scaler.update()
            else:
                optimizer.step()
            if model is models[0]:
                assert torch.equal(model[0].weight.grad, before)
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        # The bound on the norm is held in fp32: 0.05 is off by up to half its ULP.
        torch.testing.assert_close(one, two, rtol=0, atol=5 * torch.finfo(torch.float32).eps)


@every
def test_clipping_may_begin_and_end_at_any_step(make):
    models = [net(), net()]
    optimizers = [make(models[0].parameters()), make(models[1].parameters(), max_grad_norm=0.01)]
    for step in range(6):
        for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
            group["max_grad_norm"] = 0.01 if step in (2, 3) else None
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    assert_same(*models)


def test_unscaled_by_hand_first(device):
    """After ``unscale_`` the step has no scale, but overflows are still reported."""
    model = net().to(device)
    optimizer = MAKES["lamb"](model.parameters())
    with_scaler = scaler(device)
    backward(model, 0, with_scaler)
    with_scaler.unscale_(optimizer)
    model[0].weight.grad[0, 0] = 1.0  # after the check: the scaler has found all gradients finite
    before = weights(model)
    with_scaler.step(optimizer)
    with_scaler.update()
    assert not any(map(torch.equal, before, weights(model)))
    optimizer.zero_grad()
    backward(model, 1, with_scaler)
    model[2].bias.grad[0] = torch.nan
    with_scaler.unscale_(optimizer)
    before = weights(model)
    with_scaler.step(optimizer)
    with_scaler.update()
    assert all(map(torch.equal, before, weights(model)))
