"""``FusedLAMB`` does what its equations say: against float64, within the rounding errors that fp32 must make."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore.optim import FusedLAMB, param_groups
from helpers import rules

SIZES = (0, 1, 15, 16, 17, 4095, 4096, 4097)  # around the vector and the block of the kernels
STEPS = 20
# What is given to the optimizer, and what the equations call it where that is something else.
RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "paper": ({}, {}),
    "decay": ({"weight_decay": 0.1}, {}),
    "coupled": ({"weight_decay": 0.1, "decay_mode": "coupled"}, {}),
    "decoupled": ({"weight_decay": 0.1, "decay_mode": "decoupled"}, {}),
    "betas": ({"betas": (0.8, 0.9), "weight_decay": 0.01}, {}),
    "no memory": ({"betas": (0.0, 0.0), "eps": 0.1}, {}),
    "eps": ({"eps": 0.1}, {}),
    "nvlamb": ({"variant": "nvlamb", "weight_decay": 0.1}, {}),
    "undebiased": ({"variant": "undebiased", "weight_decay": 0.1}, {"debias": False}),
    "maximize": ({"maximize": True, "weight_decay": 0.1}, {}),
    "clipped from above": ({"trust_clip": 0.5, "weight_decay": 0.1}, {"trust_clip": (0.0, 0.5)}),
    "clipped from below": ({"trust_clip": (1.5, 9.0), "weight_decay": 0.1}, {}),
    "weight norm from above": ({"weight_norm_clip": 0.75}, {"weight_norm_clip": (0.0, 0.75)}),
    "weight norm from below": ({"weight_norm_clip": (20.0, 1e9)}, {}),
    "not adapted": ({"always_adapt": False}, {"adapt": False}),
}
RENAMED = ("variant", "always_adapt")


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


def equation(given: dict[str, Any], named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in RENAMED} | named


CASES = [(rule, torch.float32) for rule in RULES]
CASES += [(rule, dtype) for rule in ("decay", "coupled", "decoupled") for dtype in (torch.float64, torch.bfloat16)]


@pytest.mark.parametrize(("rule", "dtype"), CASES, ids=str)
def test_twenty_steps_are_those_of_the_equations(rule, dtype, device):
    options, named = RULES[rule]
    starts = [param.detach() for param in tensors(dtype)]
    params = [nn.Parameter(start.clone().to(device)) for start in starts]
    optimizer = FusedLAMB(params, lr=0.01, **options)
    grads = train(optimizer, params, device=device)
    reported = optimizer.trust_ratios()
    expected = rules.lamb(starts, grads, lr=0.01, **equation(options, named))
    for index, (param, (exact, ratio)) in enumerate(zip(params, expected, strict=True)):
        exact.check(param, f"{param.numel()} elements")
        if dtype != torch.bfloat16:
            assert reported[index].ratio == pytest.approx(ratio, rel=1e-4), "the bound of 20 steps is far below this"
        assert optimizer.state[param]["exp_avg"].dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)


@pytest.mark.parametrize("rule", ["decay", "coupled", "decoupled", "undebiased", "clipped from above"])
def test_the_bound_tells_rules_apart(rule):
    """Without this, the test above could pass with wrong kernels."""
    options, named = RULES[rule]
    params = tensors(sizes=(17,))
    start = params[0].detach().clone()
    grads = train(FusedLAMB(params, lr=0.01, **options), params, steps=5)[0]
    right = {"lr": 0.01, **equation(options, named)}
    exact, _ = rules.lamb([start], [grads], **right)[0]
    exact.check(params[0], rule)
    assert exact.error.max() < 100 * torch.finfo(torch.float32).eps * exact.value.abs().max()
    wrong = [{"decay_mode": mode} for mode in ("in_update", "coupled", "decoupled") if mode != right.get("decay_mode")]
    wrong = [change for change in wrong if right.get("decay_mode", "in_update") != change["decay_mode"]]
    wrong += [{"lr": 0.01001}, {"betas": (0.9001, 0.999)}, {"betas": (0.9, 0.9991)}, {"weight_decay": 0.1001}]
    wrong += [{"eps": 1e-3}, {"debias": not right.get("debias", True)}, {"maximize": True}, {"adapt": False}]
    for change in wrong:
        with pytest.raises(AssertionError, match="exact is"):
            rules.lamb([start], [grads], **{**right, **change})[0][0].check(params[0], f"{change}")


@pytest.mark.parametrize(
    ("variant", "always_adapt", "decays", "adapted"),
    [
        ("paper", None, (0.0,), (True,)),
        ("paper", None, (0.0, 0.1), (False, True)),
        ("paper", True, (0.0, 0.1), (True, True)),
        ("paper", False, (0.0, 0.1), (False, True)),
        ("paper", False, (0.0,), (False,)),
        ("nvlamb", None, (0.0, 0.1), (True, True)),
        ("nvlamb", None, (0.0,), (True,)),
        ("nvlamb", False, (0.0, 0.1), (False, True)),
        ("undebiased", None, (0.0, 0.1), (True, True)),
        ("undebiased", False, (0.0, 0.1), (False, True)),
    ],
)
def test_which_groups_are_adapted(variant, always_adapt, decays, adapted):
    """A group with decay always has a ratio; for others, always_adapt decides, or else the variant."""
    params = tensors(sizes=(7,) * len(decays))
    starts = [param.detach().clone() for param in params]
    groups = [{"params": [param], "weight_decay": decay} for param, decay in zip(params, decays, strict=True)]
    optimizer = FusedLAMB(groups, lr=0.01, variant=variant, always_adapt=always_adapt)
    grads = train(optimizer, params, steps=3)
    for index, param in enumerate(params):
        options = {"weight_decay": decays[index], "adapt": adapted[index], "debias": variant != "undebiased"}
        rules.lamb([starts[index]], [grads[index]], lr=0.01, **options)[0][0].check(param, f"group {index}")
        ratio = optimizer.trust_ratios()[index].ratio
        assert (ratio != 1.0) == adapted[index]


def test_always_adapt_may_differ_by_group():
    params = tensors(sizes=(7, 7))
    optimizer = FusedLAMB(
        [{"params": params[:1], "always_adapt": True}, {"params": params[1:], "always_adapt": False}], lr=0.01
    )
    train(optimizer, params, steps=1)
    assert [row.ratio == 1.0 for row in optimizer.trust_ratios().values()] == [False, True]


def test_every_group_has_its_own_options():
    options: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"lr": 0.1, "weight_decay": 0.3}, {}),
        ({"betas": (0.5, 0.9)}, {"adapt": False}),  # no decay, beside groups that decay
        ({"variant": "undebiased", "trust_clip": 0.2}, {"trust_clip": (0.0, 0.2), "debias": False}),
        ({"decay_mode": "decoupled", "weight_decay": 0.1}, {}),
        ({"decay_mode": "coupled", "weight_decay": 0.1, "maximize": True}, {}),
        ({"eps": 0.1, "always_adapt": True, "weight_norm_clip": (0.5, 2.0)}, {}),
    ]
    params = tensors(sizes=(17, 5, 30, 64, 100, 9))
    starts = [param.detach().clone() for param in params]
    optimizer = FusedLAMB([{"params": [p], **own} for p, (own, _) in zip(params, options, strict=True)], lr=0.05)
    grads = train(optimizer, params)
    for param, start, given, (own, named) in zip(params, starts, grads, options, strict=True):
        rules.lamb([start], [given], **{"lr": 0.05, **equation(own, named)})[0][0].check(param, f"{own}")


def test_clipping_by_the_norm_of_all_gradients():
    params = tensors(sizes=(17, 4097, 3))
    starts = [param.detach().clone() for param in params]
    optimizer = FusedLAMB([{"params": params[:2]}, {"params": params[2:], "betas": (0.5, 0.9)}],
                          lr=0.01, eps=0.01, max_grad_norm=2.0, variant="nvlamb")  # fmt: skip
    grads = train(optimizer, params)
    assert all(torch.equal(param.grad, given[-1]) for param, given in zip(params, grads, strict=True))
    factors = [rules.clip_factor(step, 2.0) for step in zip(*grads, strict=True)]
    assert max(factors) < 0.1
    for index, param in enumerate(params):
        betas = (0.5, 0.9) if index == 2 else (0.9, 0.999)
        exact, _ = rules.lamb([starts[index]], [grads[index]], lr=0.01, eps=0.01, betas=betas, factors=factors)[0]
        exact.check(param, f"tensor {index}")


def test_a_learning_rate_that_changes():
    params = tensors(sizes=(100,))
    start = params[0].detach().clone()
    optimizer = FusedLAMB(params, lr=1.0, weight_decay=0.1)
    rates, grads = [0.1, 0.0, 0.03, 0.5], []
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        grads += train(optimizer, params, steps=1)[0]
    rules.lamb([start], [grads], lr=rates, weight_decay=0.1)[0][0].check(params[0], "weight")


@pytest.mark.parametrize("mode", ["in_update", "coupled", "decoupled"])
@pytest.mark.parametrize(("weight", "grad"), [(0.0, 2.0), (2.0, 0.0), (0.0, 0.0)])
def test_ratio_of_a_zero_norm_is_one_and_decay_stays(weight, grad, mode, device):
    param = nn.Parameter(torch.full((33,), weight, device=device))
    start = param.detach().cpu().clone()
    optimizer = FusedLAMB([param], lr=0.5, weight_decay=0.25, decay_mode=mode)
    for _ in range(2):
        param.grad = torch.full_like(param, grad)
        optimizer.step()
    exact, _ = rules.lamb([start], [[torch.full((33,), grad)] * 2], lr=0.5, weight_decay=0.25, decay_mode=mode)[0]
    exact.check(param, "weight")
    assert torch.equal(param == 0, torch.full_like(param, weight == 0 and grad == 0, dtype=torch.bool))
    if weight == 0 and grad != 0:
        first = FusedLAMB([fresh := nn.Parameter(start.clone().to(device))], lr=0.5, weight_decay=0.25, decay_mode=mode)
        fresh.grad = torch.full_like(fresh, grad)
        first.step()
        assert first.trust_ratios()[0][:2] == (1.0, 0.0)
        rules.lamb([start], [[torch.full((33,), grad)]], lr=0.5, adapt=False)[0][0].check(fresh, "first step")


@pytest.mark.parametrize("position", [0, 2048, 4096])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_spoils_its_own_tensor_alone(value, position, device):
    params = [nn.Parameter(torch.randn(4097).to(device)) for _ in range(3)]
    optimizer = FusedLAMB(params, lr=0.1, trust_clip=(0.1, 10.0))
    for param in params:
        param.grad = torch.randn(4097).to(device)
    params[1].grad[position] = value
    others = [nn.Parameter(param.detach().clone()) for param in params[::2]]
    for other, param in zip(others, params[::2], strict=True):
        other.grad = param.grad.clone()
    FusedLAMB(others, lr=0.1, trust_clip=(0.1, 10.0)).step()
    optimizer.step()
    assert params[1].isnan().all(), "the ratio is no number, whatever its bounds"
    assert all(torch.equal(other, param) for other, param in zip(others, params[::2], strict=True))
    assert math.isnan(optimizer.trust_ratios()[1].ratio)


def test_bias_correction_counts_each_parameters_own_steps():
    """One gets its first gradient at the third step, one skips every other step."""
    params = tensors(sizes=(9, 17, 33))
    starts = [param.detach().clone() for param in params]
    optimizer = FusedLAMB(params, lr=0.01, weight_decay=0.1)
    grads: list[list[Tensor]] = [[], [], []]
    for step in range(8):
        for index, param in enumerate(params):
            takes_part = index == 0 or (index == 1 and step >= 2) or (index == 2 and step % 2 == 0)
            param.grad = torch.randn(param.shape) if takes_part else None
            if param.grad is not None:
                grads[index].append(param.grad)
        optimizer.step()
    assert [len(given) for given in grads] == [8, 6, 4]
    for param, start, given in zip(params, starts, grads, strict=True):
        rules.lamb([start], [given], lr=0.01, weight_decay=0.1)[0][0].check(param, f"{len(given)} steps")
        assert optimizer.state[param]["step"].item() == len(given)


def test_groups_of_a_model_leave_vectors_unadapted():
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    optimizer = FusedLAMB(param_groups(model, 0.1), lr=0.01)
    train(optimizer, list(model.parameters()), steps=1)
    ratios = optimizer.trust_ratios()
    assert {name for name, row in ratios.items() if row.ratio == 1.0} == {"0.bias", "1.weight", "1.bias"}
    assert ratios["0.weight"].ratio != 1.0


def test_ratios_of_parameters_of_equal_names():
    """Those of two models in one optimizer have the indices of the parameters, also with virtual learners."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pairs = [pair for layer in model for pair in layer.named_parameters()]
    norms = [param.detach().norm().item() for _, param in pairs]
    optimizer = FusedLAMB([{"params": pairs[:2]}, {"params": pairs[2:]}], lr=0.01, weight_decay=0.1)
    train(optimizer, list(model.parameters()), steps=1)
    assert list(optimizer.trust_ratios()) == [0, 1, 2, 3]
    assert [row.weight_norm for row in optimizer.trust_ratios().values()] == pytest.approx(norms)
    optimizer = FusedLAMB(pairs, lr=0.01)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Ring()), learners=2)
    handle.model(torch.randn(2, 3, 4)).sum().backward()
    optimizer.step()
    assert {index: len(rows) for index, rows in optimizer.trust_ratios().items()} == dict.fromkeys(range(4), 2)
