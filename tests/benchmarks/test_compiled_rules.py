"""The rules that ``compiled_rules.py`` compiles are the rules of our optimizers."""

from __future__ import annotations

from typing import Any

import compiled_rules
import pytest
import torch
from compiled_rules import RULES, ForeachStep


@pytest.mark.parametrize("compiled", [False, pytest.param(True, id="compiled")])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_that_of_our_optimizer(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps: of the rule, and of the traced rule without code of its own."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda rule, **more: compile_(rule, backend="eager", **more))
    ours, theirs = ([torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 4), (5,))] for _ in range(2))
    for one, other in zip(ours, theirs, strict=True):
        other.data.copy_(one.data)
    make, rule, settings = RULES[name]
    steps: list[Any] = [make(ours, **settings), ForeachStep(theirs, rule, compiled=compiled, **settings)]
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for step in steps:
            step.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_parameters_have_gradients_of_their_own() -> None:
    params = compiled_rules.parameters("mlp", "cpu")
    assert sum(param.numel() for param in params) > 0
    assert all(param.grad is not None and param.grad.shape == param.shape for param in params)
