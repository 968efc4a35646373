"""The tables of the rules, and what follows from them: signatures, defaults, and what an optimizer passes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from ddpcore import ops
from ddpcore.ops.steps import REQUIRED, RULES
from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD
from helpers import steps

OPTIMIZERS = {"sgd": FusedSGD, "adamw": FusedAdamW, "lars": FusedLARS, "lamb": FusedLAMB}
every_rule = pytest.mark.parametrize("rule", RULES)


def test_every_rule_has_an_optimizer_and_is_in_the_tests_of_all_steps():
    assert list(RULES) == list(OPTIMIZERS) == steps.RULES


@every_rule
def test_the_signature_is_that_of_the_table(rule):
    shown = inspect.signature(getattr(ops, f"{rule}_step_")).parameters
    table = RULES[rule]
    assert list(shown) == [*(argument.name for argument in table.arguments), "mixture", "offsets"]
    for place, argument in enumerate(table.arguments):
        parameter = shown[argument.name]
        assert parameter.default == (inspect.Parameter.empty if argument.default is REQUIRED else argument.default)
        assert (parameter.kind is inspect.Parameter.KEYWORD_ONLY) == (place >= len(table.tensors))


@every_rule
def test_defaults_are_those_of_the_call_that_gives_them(rule, assert_same_bits):
    table = RULES[rule]
    given = {a.name: a.default for a in table.arguments if a.default is not REQUIRED and a not in table.tensors}
    given |= {"lr": [0.05], "weight_decay": [0.0], "group_sizes": [2]} | ({"adapt": [1]} if table.uses_norms else {})
    explicit = steps.new_step(rule, [torch.randn(40), torch.randn(17)])
    implicit = explicit.change(lambda tensor: tensor.clone())
    explicit.options = given
    implicit.options = {"lr": 0.05} | ({"adapt": 1} if table.uses_norms else {})
    implicit.run()
    steps.assert_unchanged(implicit, explicit.run(), assert_same_bits)


@every_rule
def test_unknown_and_missing_arguments(rule):
    step = steps.new_step(rule, [torch.randn(40)])
    step.options["beta3"] = 0.5
    with pytest.raises(TypeError, match=f"{rule}_step_.*beta3"):
        step.run()
    del step.options["beta3"], step.options["lr"]
    with pytest.raises(TypeError, match=f"{rule}_step_.*lr"):
        step.run()


@every_rule
def test_an_optimizer_passes_every_option(rule):
    """Those of the table that are options of a group, and those that it computes."""
    param = torch.nn.Parameter(torch.randn(5))
    param.grad = torch.ones(5)
    optimizer: Any = OPTIMIZERS[rule]([param], lr=0.1)
    optimizer.step()
    (plan,) = optimizer._kept.values()
    passed = optimizer.arguments(plan.batches[0], optimizer.param_groups)
    table = RULES[rule]
    assert optimizer.rule is table
    assert passed.keys() - {"trust", "adapt"} == {option.name for option in table.options}
    group = optimizer.param_groups[0]
    for option in table.options:
        if option.option:
            whole = group[option.option]
            assert passed[option.name] == (whole if option.item is None else whole[option.item])
