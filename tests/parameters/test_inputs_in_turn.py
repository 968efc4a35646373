"""What inputs of virtual learners in turn may be, and what a model may do to them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.learner_models import learners


class _Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Tensor, parts: Any, pops: bool = False) -> Tensor:
        outputs = self.layer(inputs)
        if pops:
            parts.clear()
        elif isinstance(parts, list):
            parts.append(outputs.mean())
        else:
            parts["sum"] = outputs.sum()
        return outputs


@pytest.mark.parametrize("vectorize", [True, False])
def test_a_container_that_a_model_fills_is_refused(vectorize: bool) -> None:
    """Each learner gets a copy of it, so the program would not see the values. A model may take values out."""
    together, inputs = learners(_Fills(), 2, vectorize), torch.randn(2, 3, 4)
    for parts in ([], {}, {"sum": torch.zeros(2, 1)}):
        with pytest.raises(RuntimeError, match=r"puts values into a list or dict among its inputs.*: let forward"):
            together(inputs, parts)
    assert together(inputs, {"sum": torch.zeros(2, 1)}, pops=True).shape == (2, 3, 2)


def test_forward_mode() -> None:
    together, inputs = learners(nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.0)), 2, False), torch.randn(2, 3, 4)
    with torch.autograd.forward_ad.dual_level():
        found = together(torch.autograd.forward_ad.make_dual(inputs, torch.ones(2, 3, 4)))
        tangent = torch.autograd.forward_ad.unpack_dual(found).tangent
    for model, row in zip(together.models, tangent, strict=True):
        torch.testing.assert_close(row, model[0].weight.sum().expand(3, 1))


class _Changes(nn.Module):
    """Changes the first of its inputs in place, in one of the ways that models do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 1), how

    def forward(self, inputs: Tensor, other: Tensor) -> Tensor:
        if self.how == "values":
            inputs.mul_(2)
        elif self.how == "shape":
            inputs.unsqueeze_(1)
        else:
            inputs.t_()
        return self.layer(inputs).sum() * self.layer(other).sum()


def test_inputs_that_a_model_changes_in_place() -> None:
    """Gradients are those of each model alone, also in a second pass, and where two inputs have one memory."""
    for how in ("values", "shape", "transposed"):
        together, inputs = learners(_Changes(how), 3, False), torch.randn(3, 4, 8)
        alone, rows = copy.deepcopy(together.models), inputs.clone()
        for _ in range(2):
            together(*inputs.chunk(2, -1)).sum().backward()
            for model, row in zip(alone, rows, strict=True):
                model(*row.chunk(2, -1)).backward()
        assert torch.equal(inputs, rows), how
        for one, plain in zip(together.models, alone, strict=True):
            torch.testing.assert_close(one.layer.weight.grad, plain.layer.weight.grad)
