"""Gradients on their way into the flat buffer, and those that stay outside."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from helpers import flat as helper

network, flatten, fill_gradients, inside = helper.network, helper.flatten, helper.fill_gradients, helper.inside


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_over_steps(set_to_none: bool) -> None:
    """A plain loop with a torch optimizer: gathered gradients are views, zeroed and stepped in place."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    plain = copy.deepcopy(model)
    flat = flatten(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))
    for step in range(3):
        inputs = torch.randn(6, 5)
        for each, module in ((optimizer, model), (other, plain)):
            each.zero_grad(set_to_none=set_to_none)
            module(inputs).square().sum().backward()
        assert flat.gather_grads()
        for p, view in zip(flat.parameters, flat.grad_views, strict=True):
            assert p.grad is view
            assert inside(p.grad, flat.grad_LP)
        optimizer.step()
        other.step()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), f"step {step}"
            assert torch.equal(ours.grad, theirs.grad), f"step {step}"
            assert inside(ours, flat.param_LP)
    optimizer.zero_grad(set_to_none=set_to_none)
    if set_to_none:
        assert all(p.grad is None for p in model.parameters())
    else:
        assert not flat.grad_LP.any()
        assert all(p.grad is view for p, view in zip(flat.parameters, flat.grad_views, strict=True))


def test_a_second_backward_accumulates_in_the_view() -> None:
    model = nn.Linear(3, 2)
    flat = flatten(model)
    inputs = torch.randn(4, 3)
    model(inputs).sum().backward()
    flat.gather_grads()
    once = flat.grad_LP.clone()
    assert once.any()
    model(inputs).sum().backward()
    assert model.weight.grad is flat.grad_views[flat.names.index("weight")]
    assert torch.equal(flat.grad_LP, 2 * once)


def test_gather_of_a_mixture() -> None:
    """A gradient already in place, one from elsewhere, one of other strides, one missing over stale numbers."""
    model = network()
    flat = flatten(model)
    given = fill_gradients(model)
    assert flat.gather_grads()
    flat.grad_LP.fill_(99.0)
    by_name = dict(zip(flat.names, flat.grad_views, strict=True))
    kept = by_name["2.bias"]
    assert model[2].bias.grad is kept
    kept.fill_(5.0)
    model[2].weight.grad = given["2.weight"].clone()
    model[1].weight.grad = given["1.weight"].clone().contiguous()
    model[0].weight.grad = given["0.weight"].clone().contiguous()
    model[0].bias.grad = None
    model[1].bias.grad = None
    model.scale.grad = torch.tensor(0.25)
    assert flat.gather_grads() is False
    views = dict(zip(flat.names, flat.grad_views, strict=True))
    assert torch.equal(model[2].bias.grad, torch.full((4,), 5.0))
    for name in ("2.weight", "1.weight", "0.weight"):
        parameter = dict(model.named_parameters())[name]
        assert parameter.grad is views[name]
        assert torch.equal(parameter.grad, given[name]), name
        assert torch.equal(by_name[name], torch.full_like(given[name], 99.0)), "a gradient that is kept does not change"
        assert parameter.grad.stride() == parameter.stride()
    assert model.scale.grad is views["scale"]
    assert model.scale.grad.item() == 0.25
    assert model[0].bias.grad is None
    assert model[1].bias.grad is None
    assert not views["0.bias"].any(), "the place of a missing gradient must read zero"
    assert not views["1.bias"].any()


def test_gather_one() -> None:
    model = nn.Linear(3, 2)
    flat = flatten(model)
    flat.grad_LP.fill_(7.0)
    index = flat.names.index("weight")
    flat.gather_grad(index)
    assert model.weight.grad is None
    assert not flat.grad_views[index].any()
    assert (flat.grad_views[1 - index] == 7).all(), "another parameter's place was touched"
    model.weight.grad = torch.ones(2, 3)
    flat.gather_grad(index)
    assert model.weight.grad is flat.grad_views[index]
    assert (model.weight.grad == 1).all()
    model.weight.grad.fill_(2.0)
    flat.gather_grad(index)
    assert (flat.grad_views[index] == 2).all()


def test_gradients_that_were_there_before() -> None:
    model = network()
    given = fill_gradients(model)
    model[2].bias.grad = None
    flat = flatten(model)
    for name, parameter in model.named_parameters():
        if name == "2.bias":
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, given[name])
            assert inside(parameter.grad, flat.grad_LP)


def test_gradients_that_stay_where_autograd_left_them() -> None:
    """Those that a kernel can read there: dense, in the order of the weights, large enough."""
    model = network()
    flat = flatten(model)
    given = fill_gradients(model)
    model[2].weight.grad = given["2.weight"].t().contiguous().t()  # of other strides
    model[2].bias.grad = None
    own = {flat.names[index]: row for index, row in flat.own_grads(2).items()}
    large = {
        name for name, parameter in model.named_parameters() if parameter.numel() >= 2 and parameter.grad is not None
    }
    assert set(own) == large - {"2.weight"}
    for index, row in flat.own_grads(2).items():
        whole = torch.full_like(flat.grad_LP, -1.0)
        segment = flat.segments[index]
        whole[:, segment.offset : segment.offset + segment.numel] = row
        assert torch.equal(flat.views_of(whole)[index], given[flat.names[index]]), flat.names[index]
        assert row.data_ptr() == flat.parameters[index].grad.data_ptr()
    flat.grad_LP.fill_(99.0)
    left = [index for index, name in enumerate(flat.names) if name in own]
    flat.gather_grads(left=left)
    for index, view in enumerate(flat.grad_views):
        assert view.eq(99.0).all() == (index in left)
    flat.gather_grads()
    assert not flat.own_grads(0)
