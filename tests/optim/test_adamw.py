"""``FusedAdamW`` against its equations in float64, against torch's fused AdamW and Adam in ULPs, and as LAMB's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpcore.optim import FusedAdamW, FusedLAMB
from helpers import rules

SIZES = (0, 1, 15, 16, 17, 4095, 4096, 4097)  # around the vector and the block of the kernels
STEPS = 20
EPS = torch.finfo(torch.float32).eps
# What is given to the optimizer, and what the equations of LAMB without a ratio call it.
RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "AdamW": ({"weight_decay": 0.1}, {"decay_mode": "decoupled"}),
    "no decay": ({"weight_decay": 0.0}, {}),
    "Adam": ({"weight_decay": 0.1, "decoupled_weight_decay": False}, {"decay_mode": "coupled"}),
    "betas": ({"betas": (0.8, 0.9), "weight_decay": 0.01}, {"decay_mode": "decoupled"}),
    "no memory": ({"betas": (0.0, 0.0), "eps": 0.1, "weight_decay": 0.0}, {}),
    "eps": ({"eps": 0.1, "weight_decay": 0.0}, {}),
    "maximize": ({"maximize": True, "weight_decay": 0.1}, {"decay_mode": "decoupled"}),
}


def tensors(dtype: torch.dtype = torch.float32, sizes: Sequence[int] = SIZES) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = STEPS) -> list[list[Tensor]]:
    """Step with random gradients; returns them, one list a parameter."""
    grads: list[list[Tensor]] = [[] for _ in params]
    for _ in range(steps):
        for param, given in zip(params, grads, strict=True):
            given.append(torch.randn(param.shape).to(param.dtype))
            param.grad = given[-1].clone().to(param.device)
        optimizer.step()
    return grads


def exact_weights(starts: list[Tensor], grads: list[list[Tensor]], given: dict[str, Any], named: dict[str, Any]) -> Any:
    options = {name: value for name, value in given.items() if name != "decoupled_weight_decay"}
    return rules.lamb(starts, grads, lr=0.01, adapt=False, **{"eps": 1e-8, **options, **named})


CASES = [(rule, torch.float32) for rule in RULES]
CASES += [(rule, dtype) for rule in ("AdamW", "Adam") for dtype in (torch.float64, torch.bfloat16)]


@pytest.mark.parametrize(("rule", "dtype"), CASES, ids=str)
def test_twenty_steps_are_those_of_the_equations(rule, dtype, device):
    options, named = RULES[rule]
    starts = [param.detach() for param in tensors(dtype)]
    params = [nn.Parameter(start.clone().to(device)) for start in starts]
    optimizer = FusedAdamW(params, lr=0.01, **options)
    grads = train(optimizer, params)
    for param, (exact, _) in zip(params, exact_weights(starts, grads, options, named), strict=True):
        exact.check(param, f"{param.numel()} elements")
        assert optimizer.state[param]["exp_avg"].dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)


@pytest.mark.parametrize("rule", ["AdamW", "Adam", "eps"])
def test_the_bound_tells_rules_apart(rule):
    """Without this, the test above could pass with wrong kernels."""
    options, named = RULES[rule]
    params = tensors(sizes=(17,))
    start = [params[0].detach().clone()]
    grads = train(FusedAdamW(params, lr=0.01, **options), params, steps=5)
    exact_weights(start, grads, options, named)[0][0].check(params[0], rule)
    wrong: list[dict[str, Any]] = [{"betas": (0.9001, 0.999)}, {"betas": (0.9, 0.9991)}, {"weight_decay": 0.2}]
    wrong += [{"eps": 1e-3}, {"debias": False}, {"maximize": True}]
    if options["weight_decay"] != 0:
        wrong += [{"decay_mode": mode} for mode in ("coupled", "decoupled") if mode != named["decay_mode"]]
    for change in wrong:
        with pytest.raises(AssertionError, match="exact is"):
            exact_weights(start, grads, options, {**named, **change})[0][0].check(params[0], f"{change}")


def in_ulps(left: Tensor, right: Tensor) -> Tensor:
    """The number of float32 numbers between two tensors of the same signs."""
    return (left.detach().view(torch.int32).long() - right.detach().view(torch.int32).long()).abs()


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize(("kind", "decoupled"), [(torch.optim.AdamW, True), (torch.optim.Adam, False)])
def test_twenty_steps_are_torchs_within_four_ulps(kind, decoupled, weight_decay):
    """Of weights in [1, 2), at lr 1e-3: one rounding a step in each, of which torch's and ours rarely differ.

    Not bitwise: torch divides v_hat's root by sqrt(1 - beta2^t) and multiplies m by lr/(1 - beta1^t), where ours
    multiplies m and v by rounded factors, so that an update of LAMB has the same bits; and torch's vectors contract.
    """
    starts = [1 + torch.rand(size) for size in (1, 17, 4097, 100_003)]
    ours, theirs = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    optimizer = FusedAdamW(ours, lr=1e-3, weight_decay=weight_decay, decoupled_weight_decay=decoupled)
    torchs = kind(theirs, lr=1e-3, weight_decay=weight_decay, fused=True)
    for _ in range(STEPS):
        for one, two in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        optimizer.step()
        torchs.step()
    worst = max(int(in_ulps(one, two).max()) for one, two in zip(ours, theirs, strict=True))
    assert 0 < worst <= 4
    for one, two in zip(ours, theirs, strict=True):
        assert float(optimizer.state[one]["step"]) == float(torchs.state[two]["step"]) == STEPS
        assert in_ulps(optimizer.state[one]["exp_avg_sq"], torchs.state[two]["exp_avg_sq"]).max() <= 2 * STEPS


@pytest.mark.parametrize("decoupled", [False, True])
def test_is_lamb_without_ratios_bit_for_bit(decoupled):
    ours, theirs = tensors(), tensors()
    for one, two in zip(ours, theirs, strict=True):
        two.data.copy_(one)
    shared = {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.1}
    mode = "decoupled" if decoupled else "coupled"
    optimizer = FusedAdamW(ours, decoupled_weight_decay=decoupled, **shared)
    lamb = FusedLAMB(theirs, decay_mode=mode, trust_clip=(1.0, 1.0), **shared)
    for _ in range(5):
        for one, two in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        optimizer.step()
        lamb.step()
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


def test_the_defaults_are_torchs():
    ours, theirs = FusedAdamW(tensors()).defaults, torch.optim.AdamW(tensors()).defaults
    added = {"max_grad_norm": None, "master_weights": False, "decoupled_weight_decay": True, "state_dtype": "float32"}
    assert ours == {**{name: theirs[name] for name in ours if name in theirs}, **added}
    assert set(theirs) - set(ours) == {"foreach", "capturable", "differentiable", "fused"}


def test_amsgrad_names_the_optimizer_that_has_it():
    with pytest.raises(ValueError, match=r"amsgrad is True: .* take torch.optim.AdamW\(amsgrad=True\)"):
        FusedAdamW(tensors(), amsgrad=True)
    saved = torch.optim.AdamW(tensors(sizes=(3,)), amsgrad=True).state_dict()
    optimizer = FusedAdamW(tensors(sizes=(3,)), lr=0.5)
    with pytest.raises(ValueError, match="amsgrad is True"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
