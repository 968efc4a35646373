"""``FusedLARS`` does what its equations say: against float64, within the rounding errors that fp32 must make."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpcore.optim import FusedLARS, TrustRatio, param_groups
from helpers import rules

SIZES = (0, 1, 15, 16, 17, 4095, 4096, 4097)  # around the vector and the block of the kernels
VARIANTS = ("you2017", "scaled_grad", "scaled_lr")
STEPS = 20
# A large trust coefficient, so that a step changes every bit that it should.
RULES: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "momentum": {"momentum": 0.9},
    "decay": {"momentum": 0.9, "weight_decay": 0.05},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.05},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    "maximize": {"momentum": 0.5, "maximize": True, "weight_decay": 0.05},
    "decoupled": {"momentum": 0.9, "decoupled_weight_decay": True, "weight_decay": 0.05},
    "eps": {"momentum": 0.9, "eps": 3.0, "weight_decay": 0.05},
    "not adapted": {"momentum": 0.9, "always_adapt": False, "weight_decay": 0.05, "lr": 0.01},
}


def tensors(dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = SIZES) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]


def train(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = STEPS, device: Any = "cpu"
) -> list[list[Tensor]]:
    """Step with random gradients; returns them, one list a parameter."""
    grads: list[list[Tensor]] = [[] for _ in params]
    for _ in range(steps):
        for param, given in zip(params, grads, strict=True):
            given.append(torch.randn(param.shape).to(param.dtype))
            param.grad = given[-1].clone().to(device)
        optimizer.step()
    return grads


CASES = [(rule, torch.float32) for rule in RULES]
CASES += [(rule, dtype) for rule in ("dampening", "nesterov") for dtype in (torch.float64, torch.bfloat16)]


@pytest.mark.parametrize(("rule", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_twenty_steps_are_those_of_the_equations(variant, rule, dtype, device):
    options = {"lr": 0.1, "trust_coefficient": 0.3, "variant": variant, **RULES[rule]}
    params = tensors(dtype)
    starts = [param.detach().clone() for param in params]
    params = [nn.Parameter(param.detach().to(device)) for param in params]
    optimizer = FusedLARS(params, **options)
    grads = train(optimizer, params, device=device)
    reported = optimizer.trust_ratios()
    for index, (param, (exact, ratio)) in enumerate(zip(params, rules.lars(starts, grads, **options), strict=True)):
        exact.check(param, f"{param.numel()} elements")
        if dtype != torch.bfloat16:
            assert reported[index].ratio == pytest.approx(ratio, rel=1e-4), "the bound of 20 steps is far below this"


@pytest.mark.parametrize("rule", ["momentum", "dampening", "nesterov", "decoupled"])
def test_the_bound_tells_rules_apart(rule):
    """Without this, the test above could pass with wrong kernels."""
    options = {"lr": 0.1, "trust_coefficient": 0.3, **RULES[rule]}
    params = tensors(sizes=(17,))
    start = params[0].detach().clone()
    grads = train(FusedLARS(params, variant="you2017", **options), params, steps=5)[0]
    exact, _ = rules.lars([start], [grads], variant="you2017", **options)[0]
    exact.check(params[0], rule)
    assert exact.error.max() < 100 * torch.finfo(torch.float32).eps * exact.value.abs().max()
    wrong = [{"variant": "scaled_lr"}, {"eps": 1e-3}, {"momentum": 0.90001}, {"trust_coefficient": 0.30001}]
    wrong += [{"dampening": 0.3 - options.get("dampening", 0.0)}, {"nesterov": not options.get("nesterov", False)}]
    wrong += [{"weight_decay": 0.0501}, {"lr": 0.10001}, {"maximize": True}, {"always_adapt": False}]
    for change in wrong:
        other, _ = rules.lars([start], [grads], **{"variant": "you2017", **options, **change})[0]
        with pytest.raises(AssertionError, match="exact is"):
            other.check(params[0], f"{change}")


def test_scaled_grad_is_told_from_you2017_by_a_changing_learning_rate():
    """They differ only when the rate changes: the momentum of some variants contains the old rate."""
    for variant, other in [("you2017", "scaled_grad"), ("scaled_grad", "you2017")]:
        params = tensors(sizes=(17,))
        start = params[0].detach().clone()
        optimizer = FusedLARS(params, lr=0.1, trust_coefficient=0.3, variant=variant)
        grads = train(optimizer, params, steps=3)[0]
        optimizer.param_groups[0]["lr"] = 0.02
        grads += train(optimizer, params, steps=3)[0]
        rates = [0.1] * 3 + [0.02] * 3
        rules.lars([start], [grads], lr=rates, trust_coefficient=0.3, variant=variant)[0][0].check(params[0], variant)
        with pytest.raises(AssertionError, match="exact is"):
            rules.lars([start], [grads], lr=rates, trust_coefficient=0.3, variant=other)[0][0].check(params[0], other)


def test_every_group_has_its_own_options():
    options: list[dict[str, Any]] = [
        {"lr": 0.1},
        {"weight_decay": 0.2},
        {"always_adapt": False, "lr": 0.003},
        {"variant": "scaled_lr", "trust_coefficient": 0.1},
        {"momentum": 0.0, "eps": 0.5},
        {"nesterov": True, "lr": 0.2},
        {"maximize": True},
    ]
    params = tensors(sizes=(17, 5, 30, 64, 100, 1, 9))
    starts = [param.detach().clone() for param in params]
    shared = {"lr": 0.05, "momentum": 0.8, "trust_coefficient": 0.3}
    optimizer = FusedLARS([{"params": [p], **o} for p, o in zip(params, options, strict=True)], **shared)
    grads = train(optimizer, params)
    for param, start, given, own in zip(params, starts, grads, options, strict=True):
        rules.lars([start], [given], **{**shared, **own})[0][0].check(param, f"{own}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_clipping_by_the_norm_of_all_gradients(variant):
    """The norm is that of all tensors of all groups, and R uses the clipped gradients."""
    params = tensors(sizes=(17, 4097, 3))
    starts = [param.detach().clone() for param in params]
    options = {"lr": 0.1, "trust_coefficient": 0.3, "variant": variant, "weight_decay": 0.1, "eps": 1.0}
    optimizer = FusedLARS([{"params": params[:2]}, {"params": params[2:], "nesterov": True}],
                          max_grad_norm=2.0, **options)  # fmt: skip
    grads = train(optimizer, params)
    assert all(torch.equal(param.grad, given[-1]) for param, given in zip(params, grads, strict=True))
    factors = [rules.clip_factor(step, 2.0) for step in zip(*grads, strict=True)]
    assert max(factors) < 0.1
    for index, param in enumerate(params):
        exact, _ = rules.lars([starts[index]], [grads[index]], nesterov=index == 2, factors=factors, **options)[0]
        exact.check(param, f"tensor {index}")


def test_gradients_within_the_norm_are_left_alone(assert_same_bits):
    left, right = tensors(sizes=(17, 3)), tensors(sizes=(17, 3))
    for one, two in zip(left, right, strict=True):
        two.data.copy_(one.data)
        one.grad = torch.randn(one.shape)
        two.grad = one.grad.clone()
    FusedLARS(left, max_grad_norm=1000.0).step()
    FusedLARS(right).step()
    for one, two in zip(left, right, strict=True):
        assert_same_bits(one, two)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("weight", "grad"), [(0.0, 2.0), (2.0, 0.0), (0.0, 0.0)])
def test_ratio_of_a_zero_norm_is_one_and_decay_stays(weight, grad, variant, device):
    """Tensors that start at zero must be able to change."""
    param = nn.Parameter(torch.full((33,), weight, device=device))
    optimizer = FusedLARS([param], lr=0.5, momentum=0.9, weight_decay=0.25, variant=variant)
    param.grad = torch.full_like(param, grad)
    optimizer.step()
    assert torch.equal(param, torch.full_like(param, weight - 0.5 * (grad + 0.25 * weight)))
    assert optimizer.trust_ratios()[0] == pytest.approx((1.0, weight * math.sqrt(33), grad * math.sqrt(33)))


@pytest.mark.parametrize("position", [0, 2048, 4096])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_spoils_its_own_tensor_alone(value, position, device):
    """As in the equations, an infinite norm makes R zero or NaN. The effect must be visible, and only in its tensor."""
    params = [nn.Parameter(torch.randn(4097).to(device)) for _ in range(3)]
    optimizer = FusedLARS(params, lr=0.1)
    for param in params:
        param.grad = torch.randn(4097).to(device)
    params[1].grad[position] = value
    expected = [params[0].detach().clone(), params[2].detach().clone()]
    others = [nn.Parameter(weight) for weight in expected]
    for other, param in zip(others, params[::2], strict=True):
        other.grad = param.grad.clone()
    FusedLARS(others, lr=0.1).step()
    optimizer.step()
    assert params[1][position].isnan()
    assert all(torch.equal(other, param) for other, param in zip(others, params[::2], strict=True))
    row = optimizer.trust_ratios()[1]
    assert isinstance(row, TrustRatio)
    assert not math.isfinite(row.update_norm)
    assert row.ratio == 0 or math.isnan(row.ratio)


def test_groups_of_a_model_leave_vectors_unadapted():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    optimizer = FusedLARS(param_groups(model, 0.1), lr=0.1, momentum=0.0, trust_coefficient=0.3)
    starts = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    ratios = optimizer.trust_ratios()
    assert set(ratios) == {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}
    for name, param in model.named_parameters():
        if param.ndim > 1:
            decayed = 1 + 0.1 * starts[name]
            ratio = 0.3 * starts[name].norm() / (math.sqrt(param.numel()) + 0.1 * starts[name].norm() + 1e-8)
            assert ratios[name].ratio == pytest.approx(float(ratio), rel=1e-5)
            torch.testing.assert_close(param.detach(), starts[name] - 0.1 * ratio * decayed)
        elif param.requires_grad:
            assert ratios[name].ratio == 1.0
            assert torch.equal(param, starts[name] - torch.tensor(0.1))
        else:
            assert torch.equal(param, starts[name])
    with pytest.raises(ValueError, match="weight_decay is -1"):
        param_groups(model, -1.0)
    with pytest.raises(ValueError, match="no parameter that needs a gradient"):
        param_groups(model.requires_grad_(False), 0.1)
