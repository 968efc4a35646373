"""``lamb_step_`` against its reference (bitwise) and against the rule of the paper in float64 (within rounding)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpcore import ops
from helpers import steps

MODES = ["in_update", "coupled", "decoupled"]
# Roundings of u: the gradient and its decay (4), m (4) and its bias (2), v (5, halved by the root) and its bias, root,
# eps, sum and quotient (6), decay (3); of w: step size (2), two products and a difference (3).
TERMS = 24


def lamb(step: steps.Step, index: int) -> dict[str, Any]:
    """One tensor's step by the equations of the paper and the docstring.

    ``*_terms`` are the sums of the absolute values of the terms. Those of the weight hold besides what an error of the
    update does to its norm, and so to the ratio: at most |terms of u| / |u| of the step.
    """
    o = step.options
    group = step.group_of(index)
    lr, decay, beta1, beta2 = o["lr"][group], o["weight_decay"][group], o["beta1"], o["beta2"]
    w, g = step.params[index], step.grads[index] * (-1.0 if o["maximize"] else 1.0)
    m, v = (buffers[index] for buffers in step.buffers)
    t = int(step.steps[group].item()) + 1
    coupled = decay if o["decay_mode"] == "coupled" else 0.0
    d, d_terms = g + coupled * w, g.abs() + coupled * w.abs()
    m, m_terms = beta1 * m + (1 - beta1) * d, beta1 * m.abs() + (1 - beta1) * d_terms
    v, v_terms = beta2 * v + (1 - beta2) * d**2, beta2 * v + (1 - beta2) * d_terms**2
    c1, c2 = (1 - beta1**t, 1 - beta2**t) if o["debias"] else (1.0, 1.0)
    root = (v / c2).sqrt() + o["eps"]
    inside = decay if o["decay_mode"] == "in_update" else 0.0
    u, u_terms = m / c1 / root + inside * w, m_terms / c1 / root * (v_terms / v) + inside * w.abs()
    w_norm, u_norm, ratio = float(w.norm()), float(u.norm()), 1.0
    if o["adapt"][group] and w_norm > 0 and u_norm > 0:
        phi = min(max(w_norm, o["min_weight_norm"]), o["max_weight_norm"])
        ratio = min(max(phi / u_norm, o["min_ratio"]), o["max_ratio"])
    keep = 1 - lr * decay if o["decay_mode"] == "decoupled" else 1.0
    spread = 1 + float(u_terms.norm()) / u_norm
    return {
        "weight": keep * w - lr * ratio * u,
        "weight_terms": keep * w.abs() + lr * ratio * u_terms * spread,
        "buffers": (m, v),
        "buffer_terms": (m_terms, v_terms),
        "trust": (ratio, w_norm, u_norm),
        "spread": spread,
    }


@pytest.mark.parametrize("kind", steps.KINDS)
@pytest.mark.parametrize("decay_mode", MODES)
def test_every_rule(decay_mode, kind, device, assert_same_bits, assert_near):
    dtype, masters = steps.KINDS[kind]
    switches = itertools.product((0.0, 0.02), (0.0, 0.9), *[(False, True)] * 3, (0.0, 4.0))
    for decay, beta1, debias, maximize, adapt, begun in switches:
        weights = [torch.randn(300).to(dtype).to(device), torch.randn(2, 9).to(dtype).to(device)]
        step = steps.new_step("lamb", weights, masters=masters, weight_decay=[decay], adapt=[int(adapt)], beta1=beta1)
        step.options.update(debias=debias, maximize=maximize, decay_mode=decay_mode)
        step.steps[0].fill_(begun)
        check_rule(step, assert_same_bits, assert_near)


@pytest.mark.parametrize(
    "bounds",
    [
        {"min_ratio": 50.0},
        {"max_ratio": 0.1},
        {"min_weight_norm": 100.0},
        {"max_weight_norm": 0.01},
        {"max_weight_norm": 0.01, "min_ratio": 0.3},
        {"min_weight_norm": 100.0, "max_ratio": 2.0},
        {"eps": 0.1, "beta2": 0.5},
    ],
    ids=str,
)
def test_every_bound(bounds, device, assert_same_bits, assert_near):
    step = steps.new_step("lamb", [torch.randn(300).to(device), torch.randn(2, 9).to(device)], weight_decay=[0.02])
    free = step.on_cpu().run()
    step.options.update(bounds)
    check_rule(step, assert_same_bits, assert_near)
    assert (step.trust[:, 0].cpu() != free.trust[:, 0]).all()
    got = {"min_ratio": step.trust[:, 0].min(), "max_ratio": step.trust[:, 0].max()}
    for name in bounds.keys() & got.keys():
        assert math.isclose(float(got[name]), bounds[name], rel_tol=steps.EPS)


def check_rule(step: steps.Step, assert_same_bits: Any, assert_near: Any) -> None:
    expected, exact = steps.run_reference(step), step.exact()
    step.run()
    steps.assert_same_step(step, expected, assert_same_bits)
    for index in range(len(step.params)):
        want = lamb(exact, index)
        got = step.masters[index] if step.masters else step.params[index]
        assert_near(got, want["weight"], want["weight_terms"], TERMS)
        for buffers, moment, terms in zip(step.buffers, want["buffers"], want["buffer_terms"], strict=True):
            assert_near(buffers[index], moment, terms, TERMS)
        relative = TERMS * steps.EPS * want["spread"]
        torch.testing.assert_close(step.trust[index].tolist(), list(want["trust"]), rtol=relative, atol=0.0)
        if step.masters:
            assert_same_bits(step.params[index], got.to(step.params[index].dtype))


def test_not_adapted_is_adamw(device):
    """With ratio 1 and decoupled decay, LAMB is AdamW: compared with three steps of torch's."""
    ours = [torch.randn(300).to(device)]
    theirs = torch.nn.Parameter(ours[0].clone())
    optimizer = torch.optim.AdamW([theirs], lr=0.05, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    step = steps.new_step("lamb", ours, adapt=[0], decay_mode="decoupled", weight_decay=[0.1])
    for tensor in (*step.buffers[0], *step.buffers[1], *step.steps):
        tensor.zero_()
    largest = ours[0].abs().max() + 3 * 0.05 * 10  # an update of Adam is at most 1/sqrt(1 - beta2) long
    for _ in range(3):
        theirs.grad = torch.randn_like(theirs)
        step.grads = [theirs.grad.clone()]
        step.run()
        optimizer.step()
    assert ((ours[0] - theirs.detach()).abs() <= 3 * TERMS * steps.EPS * largest).all()
    assert step.steps[0] == 3.0


def test_a_norm_of_zero_makes_the_ratio_one(device, assert_same_bits):
    """Weights of zero must change; an update of zero changes nothing."""
    step = steps.new_step("lamb", [torch.zeros(50).to(device), torch.randn(50).to(device), torch.zeros(0).to(device)])
    step.options.update(weight_decay=[0.0])
    step.grads[1].zero_()
    step.buffers[0][1].zero_()
    before = step.params[1].clone()
    expected = steps.run_reference(step)
    steps.assert_same_step(step.run(), expected, assert_same_bits)
    assert step.trust[:, 0].tolist() == [1.0] * 3
    assert (step.params[0] != 0).all()
    assert_same_bits(step.params[1], before)


def test_many_steps_keep_the_correction_of_the_bias_exact(device, assert_same_bits):
    """At step 1000, and at a step where beta^step is 0 in float."""
    for taken in (999.0, 16_000_000.0):
        step = steps.new_step("lamb", [torch.randn(50).to(device)])
        step.options["beta2"] = 0.9999
        step.steps[0].fill_(taken)
        exact, expected = step.exact(), steps.run_reference(step)
        steps.assert_same_step(step.run(), expected, assert_same_bits)
        want = lamb(exact, 0)["trust"][2]
        assert math.isclose(float(step.trust[0, 2]), want, rel_tol=2 * TERMS * steps.EPS)
        assert step.steps[0] == taken + 1


def test_the_defaults_are_those_of_the_docstring(device, assert_same_bits):
    step = steps.new_step("lamb", [torch.randn(500).to(device)])
    step.options.update(beta2=0.999)
    copy = step.change(lambda tensor: tensor.clone())
    step.run()
    lists: tuple[list[Tensor], ...] = (copy.params, copy.grads, *copy.buffers, [], copy.steps)
    ops.lamb_step_(*lists, copy.scratch, copy.trust, lr=[0.05], weight_decay=[0.01], group_sizes=[1], adapt=[1])
    assert_same_bits(step.params[0], copy.params[0])
    assert_same_bits(step.trust, copy.trust)
