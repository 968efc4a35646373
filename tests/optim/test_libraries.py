"""Rules that another library has too give the same steps in both.

In float64, where both compute their equation to 1e-15, so that a difference in the rule cannot hide behind rounding.
``s`` stands for any learning rate, momentum, betas and decay. Ours, and what it equals:

- ``FusedSGD(s)`` = ``torch.optim.SGD(s)``
- ``FusedAdamW(s)`` = ``torch.optim.AdamW(s)``; with ``decoupled_weight_decay=False``, ``torch.optim.Adam(s)``
- ``FusedLAMB(s, always_adapt=False, eps=1e-8)`` = ``torch.optim.Adam(s)`` without decay
- ``FusedLAMB(s, trust_clip=(1, 1), decay_mode="coupled", eps=1e-8)`` = ``torch.optim.Adam(s)``
- ``FusedLAMB(s, trust_clip=(1, 1), decay_mode="decoupled", eps=1e-8)`` = ``torch.optim.AdamW(s)``
- ``FusedLARS(s, variant="scaled_grad", trust_coefficient=t)`` =
  ``timm.optim.Lars(s, trust_coeff=t, always_adapt=True)`` =
  ``torch_optimizer.LARS(s, trust_coefficient=t)`` where there is decay
- ``FusedLARS(s, variant="scaled_grad", trust_coefficient=t, always_adapt=False)`` = ``timm.optim.Lars(s)``
  = ``torch_optimizer.LARS(s)`` without decay
- ``FusedLARS(param_groups(model, d), s, variant="scaled_grad", eps=0)`` = ``pytorch_optimizer.LARS(s, weight_decay=d)``
- ``FusedLAMB(s, variant="paper", always_adapt=a)`` = ``timm.optim.Lamb(s, always_adapt=a, max_grad_norm=None)``;
  ``trust_clip=1.0`` = ``trust_clip=True``; ``variant="undebiased"`` = ``bias_correction=False``
- ``FusedLAMB(s, variant="undebiased", weight_norm_clip=c)`` = ``torch_optimizer.Lamb(s, clamp_value=c)``
- ``FusedLAMB(s, variant="undebiased", always_adapt=False)`` = ``torch_optimizer.Lamb(s, adam=True)`` without decay
- ``FusedLAMB(s, variant="paper", always_adapt=False, eps=0)`` =
  ``torch_optimizer.Lamb(s, adam=True, debias=True, eps=0)`` without decay
- ``FusedLAMB(s, variant="undebiased", weight_norm_clip=10, eps=0)``
  = ``pytorch_optimizer.Lamb(s, weight_decouple=False, adam_debias=True, eps=0)``
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD, param_groups

Make = Callable[[nn.Module], torch.optim.Optimizer]
STEPS = 12
SGD = {"lr": 0.05, "momentum": 0.9}
ADAM = {"lr": 0.01, "betas": (0.8, 0.95)}


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install it to compare with it")


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 5)).to(dtype)


def farthest(ours: Make, theirs: Make, dtype: torch.dtype = torch.float64) -> float:
    """The largest difference after some steps with the same gradients and a learning rate that changes."""
    nets = [net(dtype), net(dtype)]
    optimizers = [ours(nets[0]), theirs(nets[1])]
    generator = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        grads = [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype) for p in nets[0].parameters()]
        for one, optimizer in zip(nets, optimizers, strict=True):
            for param, grad in zip(one.parameters(), grads, strict=True):
                param.grad = grad.clone()
            for group in optimizer.param_groups:
                group["lr"] *= 0.5 if step == STEPS // 2 else 1.0
            optimizer.step()
    moved = (nets[0][0].weight - net(dtype)[0].weight).abs().max()
    assert moved > 1e-5, "a comparison of steps that do nothing shows nothing"
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    return max((one - two).abs().max().item() for one, two in pairs)


def assert_equal_rules(ours: Make, theirs: Make) -> None:
    """Float64: some ten operations of values below 10 a step, errors at most doubled by a step, over 12 steps."""
    assert farthest(ours, theirs) <= STEPS * 10 * 10 * torch.finfo(torch.float64).eps


def assert_unequal_rules(ours: Make, theirs: Make) -> None:
    assert farthest(ours, theirs) > 1e-9


def made(kind: Any, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), **options)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("extra", [{}, {"dampening": 0.3}, {"nesterov": True}, {"momentum": 0.0}, {"maximize": True}])
def test_sgd_of_torch(extra, decay):
    options = {**SGD, "weight_decay": decay, **extra}
    assert_equal_rules(made(FusedSGD, **options), made(torch.optim.SGD, **options))


def test_sgd_of_torch_is_the_same_to_the_bit_where_every_product_is_exact():
    """A rate and a momentum that are powers of two: torch's fused multiply-adds then round as two roundings do."""
    for options in ({"lr": 0.25}, {"lr": 0.25, "momentum": 0.5}, {"lr": 0.25, "momentum": 0.5, "nesterov": True}):
        assert farthest(made(FusedSGD, **options), made(torch.optim.SGD, **options), torch.float32) == 0.0


@pytest.mark.parametrize("extra", [{}, {"maximize": True}, {"eps": 1e-3}])
def test_adam_of_torch(extra):
    eps = {"eps": 1e-8, **extra}
    free = made(FusedLAMB, always_adapt=False, **ADAM, **eps)
    assert_equal_rules(free, made(torch.optim.Adam, **ADAM, **extra))
    assert_equal_rules(free, made(torch.optim.AdamW, weight_decay=0.0, **ADAM, **extra))
    for mode, kind in (("coupled", torch.optim.Adam), ("decoupled", torch.optim.AdamW)):
        theirs = made(kind, weight_decay=0.1, **ADAM, **extra)
        assert_equal_rules(
            made(FusedLAMB, trust_clip=(1.0, 1.0), decay_mode=mode, weight_decay=0.1, **ADAM, **eps), theirs
        )
        decoupled = mode == "decoupled"
        ours = made(FusedAdamW, decoupled_weight_decay=decoupled, weight_decay=0.1, **ADAM, **extra)
        assert_equal_rules(ours, theirs)
    assert_equal_rules(made(FusedAdamW, **ADAM, **extra), made(torch.optim.AdamW, **ADAM, **extra))


def test_adam_of_torch_in_fp32():
    """Each of 12 steps is of at most 3 rates of 0.01 and holds some ten roundings, and each store rounds a weight."""
    ours = made(FusedLAMB, trust_clip=(1.0, 1.0), decay_mode="decoupled", weight_decay=0.1, eps=1e-8, **ADAM)
    bound = STEPS * torch.finfo(torch.float32).eps * (0.03 * 10 + 2.0)
    assert farthest(ours, made(torch.optim.AdamW, weight_decay=0.1, **ADAM), torch.float32) <= bound


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("extra", [{}, {"dampening": 0.3}, {"nesterov": True}, {"momentum": 0.0}])
def test_lars_of_timm(extra, decay):
    timm = library("timm.optim.lars")
    options = {**SGD, "weight_decay": decay, **extra}
    ours = made(FusedLARS, variant="scaled_grad", trust_coefficient=0.02, eps=1e-8, **options)
    adapted = made(timm.Lars, trust_coeff=0.02, always_adapt=True, **options)
    assert_equal_rules(ours, adapted)
    if options["momentum"]:  # without, and while the rate is constant, the variants are one
        assert_unequal_rules(made(FusedLARS, trust_coefficient=0.02, **options), adapted)
    plain = made(FusedLARS, variant="scaled_grad", trust_coefficient=0.02, always_adapt=decay != 0, **options)
    assert_equal_rules(plain, made(timm.Lars, trust_coeff=0.02, **options))


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_of_timm(decay, always):
    timm = library("timm.optim.lamb")
    options = {**ADAM, "eps": 1e-6, "weight_decay": decay, "always_adapt": always}
    for clip, theirs in ((None, {}), (1.0, {"trust_clip": True})):
        ours = made(FusedLAMB, variant="paper", trust_clip=clip, **options)
        assert_equal_rules(ours, made(timm.Lamb, max_grad_norm=None, **options, **theirs))
    undebiased = made(FusedLAMB, variant="undebiased", **options)
    assert_equal_rules(undebiased, made(timm.Lamb, max_grad_norm=None, bias_correction=False, **options))


def test_clipping_of_timm_differs_by_its_epsilon():
    """Ours divides by norm + 1e-6, as ``clip_grad_norm_``; timm by norm: gradients differ by 1e-6/norm at most."""
    timm = library("timm.optim.lamb")
    options = {**ADAM, "eps": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1.0}
    apart = farthest(made(FusedLAMB, **options), made(timm.Lamb, **options))
    assert 1e-12 < apart <= 1e-6


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("extra", [{}, {"dampening": 0.3}, {"nesterov": True}, {"momentum": 0.0}])
def test_lars_of_torch_optimizer(extra, decay):
    theirs = library("torch_optimizer").LARS
    options = {**SGD, "weight_decay": decay, "trust_coefficient": 0.01, "eps": 1e-8, **extra}
    ours = made(FusedLARS, variant="scaled_grad", always_adapt=decay != 0, **options)
    assert_equal_rules(ours, made(theirs, **options))


@pytest.mark.parametrize("clamp", [10.0, 0.5])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_of_torch_optimizer(decay, clamp):
    theirs = library("torch_optimizer").Lamb
    options = {**ADAM, "eps": 1e-6, "weight_decay": decay}
    ours = made(FusedLAMB, variant="undebiased", weight_norm_clip=clamp, **options)
    assert_equal_rules(ours, made(theirs, clamp_value=clamp, debias=False, **options))
    paper = made(FusedLAMB, variant="paper", weight_norm_clip=clamp, **options)
    assert_unequal_rules(paper, made(theirs, clamp_value=clamp, debias=True, **options))


def test_adam_of_torch_optimizers_lamb():
    theirs = library("torch_optimizer").Lamb
    for debias, eps in ((False, 1e-6), (True, 0.0)):
        ours = made(FusedLAMB, variant="paper" if debias else "undebiased", always_adapt=False, eps=eps, **ADAM)
        assert_equal_rules(ours, made(theirs, adam=True, debias=debias, eps=eps, **ADAM))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("extra", [{}, {"nesterov": True}, {"momentum": 0.0}])
def test_lars_of_pytorch_optimizer(extra, foreach):
    theirs = library("pytorch_optimizer").LARS
    options = {**SGD, "trust_coefficient": 0.02, **extra}
    ours = lambda model: FusedLARS(param_groups(model, 0.1), variant="scaled_grad", eps=0.0, **options)  # noqa: E731
    assert_equal_rules(ours, made(theirs, weight_decay=0.1, foreach=foreach, **options))


def test_dampening_of_pytorch_optimizer_acts_at_the_first_step():
    theirs = library("pytorch_optimizer").LARS
    options = {**SGD, "trust_coefficient": 0.02, "dampening": 0.3}
    ours = lambda model: FusedLARS(param_groups(model, 0.1), variant="scaled_grad", eps=0.0, **options)  # noqa: E731
    assert_unequal_rules(ours, made(theirs, weight_decay=0.1, **options))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_of_pytorch_optimizer(decay, foreach):
    theirs = library("pytorch_optimizer").Lamb
    options = {**ADAM, "weight_decay": decay}
    same = {"weight_decouple": False, "adam_debias": True, "foreach": foreach}
    for eps, assert_ in ((0.0, assert_equal_rules), (0.1, assert_unequal_rules)):
        ours = made(FusedLAMB, variant="undebiased", weight_norm_clip=10.0, eps=eps, **options)
        assert_(ours, made(theirs, eps=eps, **same, **options))
    ours = made(FusedLAMB, variant="undebiased", weight_norm_clip=10.0, eps=0.0, **options)
    assert_unequal_rules(ours, made(theirs, eps=0.0, **{**same, "adam_debias": False}, **options))


def test_other_libraries_take_our_groups():
    model = net()
    for theirs in (torch.optim.AdamW, torch.optim.SGD):
        groups = copy.copy(theirs(param_groups(model, 0.1), lr=0.1).param_groups)
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
