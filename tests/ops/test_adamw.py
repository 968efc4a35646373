"""``adamw_step_`` against its reference (bitwise), against Adam in float64 (within rounding), and as LAMB's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpcore import ops
from helpers import steps

# Roundings of u: the gradient and its decay (4), m (4) and its bias (2), v (5, halved by the root) and its bias, root,
# eps, sum and quotient (6); of w: two products and a difference (3).
TERMS = 21


def adam(step: steps.Step, index: int) -> dict[str, Any]:
    """One tensor's step by the equations of the docstring. ``*_terms`` are the sums of the terms' absolute values."""
    o = step.options
    group = step.group_of(index)
    lr, decay, beta1, beta2 = o["lr"][group], o["weight_decay"][group], o["beta1"], o["beta2"]
    w, g = step.params[index], step.grads[index] * (-1.0 if o["maximize"] else 1.0)
    m, v = (buffers[index] for buffers in step.buffers)
    t = int(step.steps[group].item()) + 1
    coupled = 0.0 if o["decoupled"] else decay
    d, d_terms = g + coupled * w, g.abs() + coupled * w.abs()
    m, m_terms = beta1 * m + (1 - beta1) * d, beta1 * m.abs() + (1 - beta1) * d_terms
    v, v_terms = beta2 * v + (1 - beta2) * d**2, beta2 * v + (1 - beta2) * d_terms**2
    c1, c2 = 1 - beta1**t, 1 - beta2**t
    root = (v / c2).sqrt() + o["eps"]
    u, u_terms = m / c1 / root, m_terms / c1 / root * (v_terms / v)
    keep = 1 - lr * decay if o["decoupled"] else 1.0
    weight, weight_terms = keep * w - lr * u, keep * w.abs() + lr * u_terms
    return {"weight": weight, "weight_terms": weight_terms, "buffers": (m, v), "buffer_terms": (m_terms, v_terms)}


@pytest.mark.parametrize("kind", steps.KINDS)
@pytest.mark.parametrize("decoupled", [False, True])
def test_every_rule(decoupled, kind, device, assert_same_bits, assert_near):
    dtype, masters = steps.KINDS[kind]
    for decay, beta1, maximize, begun in itertools.product((0.0, 0.02), (0.0, 0.9), (False, True), (0.0, 4.0, 999.0)):
        weights = [torch.randn(300).to(dtype).to(device), torch.randn(2, 9).to(dtype).to(device)]
        step = steps.new_step("adamw", weights, masters=masters, weight_decay=[decay], beta1=beta1)
        step.options.update(maximize=maximize, decoupled=decoupled)
        step.steps[0].fill_(begun)
        expected, exact = steps.run_reference(step), step.exact()
        step.run()
        steps.assert_same_step(step, expected, assert_same_bits)
        for index, param in enumerate(step.params):
            want = adam(exact, index)
            got = step.masters[index] if step.masters else param
            assert_near(got, want["weight"], want["weight_terms"], TERMS)
            for buffers, value, terms in zip(step.buffers, want["buffers"], want["buffer_terms"], strict=True):
                assert_near(buffers[index], value, terms, TERMS)
        assert step.steps[0] == begun + 1


@pytest.mark.parametrize("kind", steps.KINDS)
@pytest.mark.parametrize("decoupled", [False, True])
def test_is_lamb_without_a_ratio(decoupled, kind, device, assert_same_bits):
    dtype, masters = steps.KINDS[kind]
    sizes = [1, 17, 4096, 9000, 0]
    step = steps.new_step("adamw", [torch.randn(size).to(dtype).to(device) for size in sizes], masters=masters)
    step.options["decoupled"] = decoupled
    lamb = step.change(lambda tensor: tensor.clone())
    lamb.rule, lamb.options = "lamb", {**lamb.options, "adapt": [0], "debias": True, "min_ratio": 0.0}
    lamb.options |= {"decay_mode": "decoupled" if lamb.options.pop("decoupled") else "coupled"}
    lamb.options |= {"max_ratio": 9.0, "min_weight_norm": 0.0, "max_weight_norm": 9.0}
    for _ in range(3):
        step.run()
        lamb.run()
    for name, tensors in step.written().items():
        for left, right in zip(tensors, lamb.written()[name], strict=True):
            assert_same_bits(left, right, name)


def test_the_defaults_are_those_of_the_docstring(device, assert_same_bits):
    step = steps.new_step("adamw", [torch.randn(500).to(device)], beta2=0.999, eps=1e-8)
    copy = step.change(lambda tensor: tensor.clone())
    step.run()
    lists: tuple[list[Tensor], ...] = (copy.params, copy.grads, *copy.buffers, [], copy.steps)
    ops.adamw_step_(*lists, copy.scratch, lr=[0.05], weight_decay=[0.01], group_sizes=[1])
    assert_same_bits(step.params[0], copy.params[0])
