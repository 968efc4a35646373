"""What inputs of virtual learners in turn may be, and what a model may do to them."""

from __future__ import annotations

import copy
from itertools import product
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
        with pytest.raises(RuntimeError, match=r"puts values into a list, dict or object.*: let forward"):
            together(inputs, parts)
    assert together(inputs, {"sum": torch.zeros(2, 1)}, pops=True).shape == (2, 3, 2)


class _Cache:
    """As a cache of keys and values: it has no tensors before the first call."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {"keys": []}


class _Caches(nn.Linear):
    def forward(self, inputs: Tensor, cache: _Cache, size: int = 0) -> Tensor:
        if cache is not None:
            cache.seen["keys"].append(inputs)
        return super().forward(inputs)


def test_an_object_that_a_model_fills_is_refused() -> None:
    """Learners would find the values of others there. An object that they only read, or that stays empty, is none."""
    inputs, cache = torch.randn(2, 3, 4), _Cache()
    for vectorize in (True, False):
        together = learners(_Caches(4, 2), 2, vectorize)
        for context in (torch.enable_grad, torch.no_grad):
            with (
                context(),
                pytest.raises(RuntimeError, match="puts values into a list, dict or object among its inputs"),
            ):
                together(inputs, _Cache(), size=3)
        assert together(inputs, None, size=3).shape == (2, 3, 2)
    with pytest.raises(RuntimeError, match="puts values into"):
        for rows, size in together.split(inputs, torch.ones(2, 1)):
            together(rows, cache, size)


class _Writes(nn.Linear):
    """Writes a result into its last input: as a buffer for outputs, as a sum, or as none."""

    def forward(self, inputs: Tensor, out: Tensor, how: str = "") -> Tensor:
        result = super().forward(inputs)
        if how == "fill":
            out[:] = result
        elif how == "part":
            out[1:].add_(result[1:])
        elif how == "asks":
            out.requires_grad_()
        return result.sum()


def test_gradients_of_what_a_model_writes_into_an_input() -> None:
    """As with each model alone, also at the second call, when the input has a graph. The models' own graphs stay."""
    for vectorize, how in product((True, False), ("fill", "part", "none", "asks")):
        if vectorize and how == "asks":
            continue  # torch refuses it inside of a transform
        together, inputs = learners(_Writes(4, 2), 3, vectorize), torch.randn(3, 5, 4)
        alone = copy.deepcopy(together.models)
        out, outs = torch.zeros(3, 5, 2), [torch.zeros(5, 2) for _ in range(3)]
        for _ in range(2):
            losses = together(inputs, out, how=how)
            others = [model(x, own, how=how) for model, x, own in zip(alone, inputs, outs, strict=True)]
        (losses.sum() + out.square().sum()).backward()
        (sum(others) + torch.stack(outs).square().sum()).backward()
        assert torch.equal(out, torch.stack(outs))
        for one, plain in zip(together.models, alone, strict=True):
            torch.testing.assert_close(one.weight.grad, plain.weight.grad)


def test_forward_mode() -> None:
    together, inputs = learners(nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.0)), 2, False), torch.randn(2, 3, 4)
    with torch.autograd.forward_ad.dual_level():
        found = together(torch.autograd.forward_ad.make_dual(inputs, torch.ones(2, 3, 4)))
        tangent = torch.autograd.forward_ad.unpack_dual(found).tangent
    for model, row in zip(together.models, tangent, strict=True):
        torch.testing.assert_close(row, model[0].weight.sum().expand(3, 1))


def test_a_sum_in_place_with_a_parameter() -> None:
    """The learners' graphs have saved the sum, which is the input."""

    class Adds(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            inputs += self.bias.sum()
            return super().forward(inputs)

    for vectorize in (True, False):
        together, inputs = learners(Adds(4, 2), 3, vectorize), torch.randn(3, 5, 4)
        alone, given = copy.deepcopy(together.models), inputs.clone()
        (together(given).square().sum() + given.sum()).backward()
        for model, row in zip(alone, inputs, strict=True):
            own = row.clone()
            (model(own).square().sum() + own.sum()).backward()
        for one, plain in zip(together.models, alone, strict=True):
            torch.testing.assert_close(one.bias.grad, plain.bias.grad)
            torch.testing.assert_close(one.weight.grad, plain.weight.grad)


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


def test_one_batch_for_all_learners_that_a_model_changes_in_place() -> None:
    """Each learner has its own, as on ranks, also in a loop over ``split``."""
    together, inputs = learners(_Changes("values"), 3, False), torch.randn(5, 8)
    alone = torch.stack([model(*inputs.clone().chunk(2, -1)) for model in together.models])
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            batch = inputs.clone()
            parts = [part.expand(3, 5, 4) for part in batch.chunk(2, -1)]
            assert torch.equal(together(*parts), alone)
            assert torch.equal(torch.cat([together(*rows) for rows in together.split(*parts)]), alone)
            assert torch.equal(batch, inputs)
    leaf = inputs[None, :, :4].repeat(3, 1, 1).requires_grad_()
    with torch.no_grad():
        together(leaf, inputs[None, :, 4:].repeat(3, 1, 1))
    assert torch.equal(leaf[2], 2 * inputs[:, :4]), "as a model alone changes its input"


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
