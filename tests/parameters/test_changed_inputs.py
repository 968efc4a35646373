"""Inputs of virtual learners that run in turn, which a learner or the program changes in place."""

from __future__ import annotations

import copy
import itertools
import math
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.learner_models import learners


class _Keeping(nn.Module):
    """Its output is no tensor: the loss is in a value that torch does not open, or in an attribute alone."""

    def __init__(self, first: nn.Module, returns: bool) -> None:
        super().__init__()
        self.first, self.layer, self.returns = first, nn.Linear(4, 2), returns

    def forward(self, x: Tensor) -> Any:
        self.loss = self.layer(self.first(x)).square().mean()
        return types.SimpleNamespace(loss=self.loss) if self.returns else None


@pytest.mark.parametrize("returns", [True, False])
def test_a_batch_that_is_overwritten_before_the_backward_pass(returns: bool) -> None:
    """Gradients are those of each model alone with the batch of its forward pass, although it returns no tensor."""
    for first, is_changed in itertools.product((nn.Linear(4, 4), nn.ReLU(inplace=True)), (False, True)):
        together, inputs = learners(_Keeping(first, returns), 2, False), torch.randn(2, 3, 4)
        alone, rows = copy.deepcopy(together.models), inputs.clone()
        outputs = together(inputs)
        if is_changed:
            inputs.copy_(torch.randn(2, 3, 4))
        sum(one.loss for one in (outputs if returns else together.models)).backward()
        for one, plain, row in zip(together.models, alone, rows, strict=True):
            plain(row)
            plain.loss.backward()
            assert torch.equal(one.layer.weight.grad, plain.layer.weight.grad)


class _Cleans(nn.Module):
    """Changes its inputs in place, as often as they have values that are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: Tensor, *parts: Tensor) -> Tensor:
        if inputs.isnan().any():
            inputs[inputs.isnan()] = 0.0
        return self.layer(inputs) + sum(part.sum() for part in parts)


def test_one_learner_may_change_its_inputs_before_it_saves_them() -> None:
    """The caller sees the change, as with one model. Inputs that are parts of each other are refused if they change."""
    together, inputs = learners(_Cleans(), 3, False), torch.randn(3, 2, 4)
    inputs[1, 0, 2] = math.nan
    alone = copy.deepcopy(together.models)
    rows = [inputs[row].clone() for row in range(3)]
    together(inputs).square().sum().backward()
    for one, plain, row, after in zip(together.models, alone, rows, inputs, strict=True):
        plain(row).square().sum().backward()
        assert torch.equal(one.layer.weight.grad, plain.layer.weight.grad)
        assert torch.equal(row, after)
    for is_recorded in (True, False):
        inputs[1, 0, 2] = math.nan
        with torch.set_grad_enabled(is_recorded):
            found = together(inputs, inputs[..., 1:])
        assert found.isfinite().all() and inputs.isfinite().all()
        if is_recorded:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                found.sum().backward()


def test_forward_mode_of_inputs_in_turn() -> None:
    together, inputs = learners(_Cleans(), 2, False), torch.randn(2, 3, 4)
    with torch.autograd.forward_ad.dual_level():
        found = together(torch.autograd.forward_ad.make_dual(inputs, torch.ones(2, 3, 4)))
        tangent = torch.autograd.forward_ad.unpack_dual(found).tangent
    for one, row in zip(together.models, tangent, strict=True):
        torch.testing.assert_close(row, one.layer.weight.sum().expand(3, 1))


class _Overwrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.is_on = nn.Linear(4, 2), False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.layer(inputs)
        return outputs + inputs.zero_().sum() if self.is_on else outputs


def test_inputs_that_a_learner_changes_after_saving_them_are_refused() -> None:
    for changed in ([0], [1], [0, 1]):
        together = learners(_Overwrites(), 2, False)
        for row in changed:
            together.models[row].is_on = True
        outputs = together(torch.randn(2, 3, 4))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outputs.square().sum().backward()


def test_a_first_layer_may_change_inputs_that_have_a_gradient() -> None:
    model, inputs = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 1)), torch.randn(2, 3, 4)
    prompts = torch.zeros(2, 4, requires_grad=True)
    together = learners(model, 2, False)
    together(inputs + prompts[0]).square().sum().backward()
    sum(one(row + prompts[1]).square().sum() for one, row in zip(together.models, inputs, strict=True)).backward()
    assert torch.allclose(prompts.grad[0], prompts.grad[1]) and prompts.grad[0].any()
