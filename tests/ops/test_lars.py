"""``lars_step_`` against its reference (bitwise) and against the rule of the paper in float64 (within rounding)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpcore import ops
from helpers import steps

VARIANTS = ["you2017", "scaled_grad", "scaled_lr"]
SWITCHES = ("momentum", "dampening", "nesterov", "decoupled", "maximize", "adapt")
RULES = [
    dict(zip(SWITCHES, values, strict=True))
    for values in itertools.product((0.0, 0.9), (0.0, 0.7), *[(False, True)] * 4)
    if values[0] or not (values[1] or values[2])  # dampening and nesterov need momentum
]
# The longest rule has 10 operations and constants of SGD, and those of R: trust_coefficient,
# decay and eps rounded, R rounded, one product.
TERMS = 15


def lars(step: steps.Step, index: int, absolute: bool = False) -> tuple[Tensor, Tensor, tuple[float, float, float]]:
    """One tensor's step by the equations of the docstring: the weight, the momentum, and R with its norms.

    ``absolute``: the sum of the absolute values of all terms, with R as it is.
    """
    o = step.options
    group = step.group_of(index)
    lr, decay, momentum = o["lr"][group], o["weight_decay"][group], o["momentum"]
    w, g = step.params[index], step.grads[index] * (-1.0 if o["maximize"] else 1.0)
    m = step.buffers[0][index]
    coupled = 0.0 if o["decoupled"] else decay
    w_norm, g_norm = float(w.norm()), float(g.norm())
    ratio = 1.0
    if o["adapt"][group] and w_norm > 0 and g_norm > 0:
        ratio = o["trust_coefficient"] * w_norm / (g_norm + coupled * w_norm + o["eps"])
    sign = -1.0
    if absolute:
        w, g, m, sign = w.abs(), g.abs(), m.abs(), 1.0
    inside = {"you2017": lr * ratio, "scaled_grad": ratio, "scaled_lr": 1.0}[o["variant"]]
    outside = {"you2017": 1.0, "scaled_grad": lr, "scaled_lr": lr * ratio}[o["variant"]]
    d = inside * (g + coupled * w)
    if momentum:
        m = d if step.steps[group].item() == 0 else momentum * m + (1 - o["dampening"]) * d
        d = d + momentum * m if o["nesterov"] else m
    kept = w * (1 - lr * decay) if o["decoupled"] else w
    return kept + sign * outside * d, m, (ratio, w_norm, g_norm)


@pytest.mark.parametrize("kind", steps.KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_rule(variant, kind, device, assert_same_bits, assert_near):
    dtype, masters = steps.KINDS[kind]
    for rule, decay, begun in itertools.product(RULES, (0.0, 0.02), (0.0, 2.0)):
        weights = [torch.randn(300).to(dtype).to(device), torch.randn(2, 9).to(dtype).to(device)]
        options: dict[str, Any] = {**rule, "adapt": [int(rule["adapt"])], "weight_decay": [decay], "variant": variant}
        step = steps.new_step("lars", weights, masters=masters, **options)
        step.steps[0].fill_(begun)
        expected, exact = steps.run_reference(step), step.exact()
        step.run()
        steps.assert_same_step(step, expected, assert_same_bits)
        for index in range(2):
            weight, momentum, trust = lars(exact, index)
            weight_terms, momentum_terms, _ = lars(exact, index, absolute=True)
            got = step.masters[index] if masters else step.params[index]
            assert_near(got, weight, weight_terms, TERMS)
            if rule["momentum"]:
                assert_near(step.buffers[0][index], momentum, momentum_terms, TERMS)
            torch.testing.assert_close(step.trust[index].tolist(), list(trust), rtol=4 * steps.EPS, atol=0.0)
            if masters:
                assert_same_bits(step.params[index], got.to(dtype))


def test_variants_are_one_algorithm_while_nothing_changes(device):
    """Without earlier momentum, all variants take the same step; their buffers differ by a factor."""
    start = steps.new_step("lars", [torch.randn(500).to(device)])
    start.steps[0].zero_()
    results = []
    for variant in VARIANTS:
        step = start.change(lambda tensor: tensor.clone())
        step.options["variant"] = variant
        results.append(step.run())
    ratio, lr = float(results[0].trust[0, 0]), 0.05
    for step, held in zip(results, (lr * ratio, ratio, 1.0), strict=True):
        bound = steps.TERMS_OF_ONE * steps.EPS * results[0].params[0].abs().max() * 2
        assert ((step.params[0] - results[0].params[0]).abs() <= bound).all()
        assert torch.allclose(step.buffers[0][0] / held, results[2].buffers[0][0], rtol=8 * steps.EPS, atol=0.0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("decoupled", [False, True])
def test_a_norm_of_zero_makes_the_ratio_one(variant, decoupled, device, assert_same_bits):
    """Weights of zero must change, and weights without gradients must decay: the step is SGD's."""
    weights = [torch.zeros(50), torch.randn(50), torch.zeros(50), torch.zeros(0)]
    step = steps.new_step("lars", [w.to(device, copy=True) for w in weights], variant=variant)
    step.options["decoupled"] = decoupled
    step.grads[1].zero_()
    step.grads[2].zero_()
    plain = step.change(lambda tensor: tensor.clone())
    plain.options["adapt"] = [0]
    expected = steps.run_reference(step)
    steps.assert_same_step(step.run(), expected, assert_same_bits)
    plain.run()
    assert step.trust[:, 0].tolist() == [1.0] * 4
    for got, want in zip(step.params, plain.params, strict=True):
        assert_same_bits(got, want)
    assert (step.params[0] != 0).all() and (step.params[1] != weights[1].to(device)).all()


def test_not_adapted_is_sgd(device, assert_same_bits):
    """R = 1 gives the bits of SGD in the variants that use the learning rate as SGD does."""
    for variant in ("scaled_grad", "scaled_lr"):
        step = steps.new_step("lars", [torch.randn(5000).to(device)], adapt=[0], variant=variant)
        copy = step.change(lambda tensor: tensor.clone())
        step.run()
        rule = {name: step.options[name] for name in ("lr", "weight_decay", "momentum")}
        ops.sgd_step_(copy.params, copy.grads, copy.buffers[0], [], copy.steps, copy.scratch, **rule)
        assert_same_bits(step.params[0], copy.params[0])
        assert_same_bits(step.buffers[0][0], copy.buffers[0][0])


def test_the_ratio_of_known_norms(device):
    """|w| = 5, |g| = 10 as stored, 2.5 once unscaled: R = 0.02*5 / (2.5 + 0.1*5 + 0.5)."""
    weight, grad = torch.tensor([3.0, 0.0, -4.0]), torch.tensor([-6.0, 8.0, 0.0])
    step = steps.new_step("lars", [weight.to(device, copy=True)], weight_decay=[0.1], eps=0.5, lr=[2.0])
    step.grads = [grad.to(device)]
    step.options["grad_scale"] = torch.tensor(4.0, device=device)
    step.run()
    want = [0.02 * 5 / (2.5 + 0.1 * 5 + 0.5), 5.0, 2.5]
    assert all(math.isclose(a, b, rel_tol=3 * steps.EPS) for a, b in zip(step.trust[0].tolist(), want, strict=True))
    step.options.update(decoupled=True)
    step.params = [weight.to(device, copy=True)]
    step.run()
    assert math.isclose(float(step.trust[0, 0]), 0.02 * 5 / (2.5 + 0.5), rel_tol=3 * steps.EPS)


def test_the_defaults_are_those_of_the_docstring(device, assert_same_bits):
    step = steps.new_step("lars", [torch.randn(500).to(device)])
    step.options.update(trust_coefficient=0.001, eps=1e-8, momentum=0.9)
    copy = step.change(lambda tensor: tensor.clone())
    step.run()
    lists = (copy.params, copy.grads, copy.buffers[0], [], copy.steps, copy.scratch, copy.trust)
    ops.lars_step_(*lists, lr=[0.05], weight_decay=[0.01], group_sizes=[1], adapt=[1])
    assert_same_bits(step.params[0], copy.params[0])
    assert_same_bits(step.trust, copy.trust)
