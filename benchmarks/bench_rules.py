"""The step of each update rule, such as ``sgd_step_``, against the step of a fused optimizer of torch.

torch has no fused LARS and LAMB: their baselines, SGD and AdamW, compute no norms. ``--rules`` chooses the rules.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from common import Case, bytes_per_param, itemsize, main, pieces, randn, torch_step

from ddpcore import ops

Tensors = list[torch.Tensor]
STEP = {"lr": 1e-3, "momentum": 0.9}
GROUP = {"lr": [1e-3], "weight_decay": [1e-4]}


class Rule(NamedTuple):
    """How a step is called, and what it is compared with.

    Attributes:
        ours: from a list of tensors, its gradients, and what else the rule keeps for them, to a step.
        num_states: lists of numbers that the rule keeps, such as the momentum.
        keeps_fp32: whether these are fp32; otherwise they have the dtype of the tensors.
        baseline: the optimizer of torch, and its options.
        is_flat: whether one flat tensor is stepped, not a list of tensors.
    """

    ours: Callable[..., Any]
    num_states: int
    keeps_fp32: bool
    baseline: type[torch.optim.Optimizer]
    options: dict[str, float]
    is_flat: bool = False


def _sgd(params: Tensors, grads: Tensors, states: list[Tensors], steps: Tensors) -> Callable[[], Any]:
    return lambda: ops.sgd_step_(params, grads, *states, **STEP)


def _lars(params: Tensors, grads: Tensors, states: list[Tensors], steps: Tensors) -> Callable[[], Any]:
    group = {**GROUP, "group_sizes": [len(params)], "adapt": [1], "momentum": STEP["momentum"]}
    scratch, trust = ops.new_scratch(params), ops.new_trust(params)
    return lambda: ops.lars_step_(params, grads, *states, [], steps, scratch, trust, **group)


def _lamb(params: Tensors, grads: Tensors, states: list[Tensors], steps: Tensors) -> Callable[[], Any]:
    group = {**GROUP, "group_sizes": [len(params)], "adapt": [1]}
    scratch, trust = ops.new_scratch(params), ops.new_trust(params)
    return lambda: ops.lamb_step_(params, grads, *states, [], steps, scratch, trust, **group)


def _adamw(params: Tensors, grads: Tensors, states: list[Tensors], steps: Tensors) -> Callable[[], Any]:
    group, scratch = {**GROUP, "group_sizes": [len(params)]}, ops.new_scratch(params)
    return lambda: ops.adamw_step_(params, grads, *states, [], steps, scratch, **group)


ADAMW = {"lr": 1e-3, "weight_decay": 1e-4}
RULES = {
    "sgd": Rule(_sgd, 1, False, torch.optim.SGD, STEP, is_flat=True),
    "lars": Rule(_lars, 1, False, torch.optim.SGD, STEP),
    "adamw": Rule(_adamw, 2, True, torch.optim.AdamW, ADAMW),
    "lamb": Rule(_lamb, 2, True, torch.optim.AdamW, ADAMW),
}


def step(name: str, numel: int, options: argparse.Namespace) -> Case:
    """The step of a rule, with its least traffic: for fp32 20 bytes an element (SGD, LARS) or 28 (AdamW, LAMB)."""
    rule = RULES[name]
    params, grads = ([randn(numel, options)] if rule.is_flat else pieces(numel, options) for _ in range(2))
    dtype = torch.float32 if rule.keeps_fp32 else None
    states = [[torch.zeros_like(param, dtype=dtype) for param in params] for _ in range(rule.num_states)]
    return Case(
        f"{name}_step_, momentum" if rule.is_flat else f"{name}_step_, {len(params)} tensors",
        rule.ours(params, grads, states, [torch.zeros(1, device=options.device)]),
        torch_step(rule.baseline, numel, options, **rule.options),
        f"torch fused {rule.baseline.__name__}",
        bytes_per_param(name, itemsize(options))[0] * numel,
    )


if __name__ == "__main__":
    main(__doc__, {name: partial(step, name) for name in RULES})
