"""Changes between two steps are noticed, or refused before anything is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import ddpcore
from ddpcore.optim import FusedLAMB, FusedLARS, FusedSGD
from ddpcore.parameters.flat import FlatParameters

OPTIMIZERS = [FusedSGD, FusedLARS, FusedLAMB]


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    result = nn.Parameter(torch.randn(shape or (5,)).to(dtype))
    result.grad = torch.randn_like(result)
    return result


def test_a_step_that_was_replaced_counts_on_from_there():
    p = parameter()
    optimizer = FusedLAMB([p], lr=0.1)
    optimizer.step()
    optimizer.state[p]["step"] = torch.tensor([100.0])
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 101


def test_a_step_that_is_a_number_counts_on():
    p = parameter()
    optimizer = FusedLAMB([p], lr=0.1)
    optimizer.step()
    optimizer.state[p]["step"] = 7
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"].item() == 8


@pytest.mark.parametrize("kind", [FusedSGD, FusedLARS])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_momentum_that_falls_to_zero_when_only_some_have_a_buffer(kind, num_groups):
    a, b = parameter(), parameter()
    optimizer = kind([b, a] if num_groups == 1 else [{"params": [b]}, {"params": [a]}], lr=0.1, momentum=0.9)
    gradient, b.grad = b.grad, None
    optimizer.step()
    b.grad = gradient
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    before = b.detach().clone()
    optimizer.step()
    assert not torch.equal(b, before)


def test_a_parameter_that_changes_its_dtype():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).bfloat16()
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    model(torch.randn(3, 4).bfloat16()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model[1].float()
    model[1](model[0](torch.randn(3, 4).bfloat16()).float()).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_gradient_that_turns_sparse_stops_the_step_before_it_begins(kind):
    half, table = parameter(5, dtype=torch.bfloat16), parameter(4, 3)
    optimizer = kind([half, table], lr=0.1)
    optimizer.step()
    before = [half.detach().clone(), table.detach().clone()]
    table.grad = table.grad.to_sparse()
    with pytest.raises(RuntimeError, match=f"{kind.__name__} needs dense gradients"):
        optimizer.step()
    assert torch.equal(half, before[0]) and torch.equal(table, before[1])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_norms_that_come_to_differ_are_refused(kind):
    optimizer = kind([{"params": [parameter()]}, {"params": [parameter()]}], lr=0.1)
    optimizer.step()
    optimizer.param_groups[1]["max_grad_norm"] = 1.0
    with pytest.raises(ValueError, match=r"max_grad_norm is 1\.0 in one group and None in another"):
        optimizer.step()


def test_a_scale_without_found_inf_counts_in_flat_buffers_too():
    results = []
    for bound in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = FusedSGD(model.parameters(), lr=0.1)
        if bound:
            optimizer.bind(FlatParameters([model.named_parameters()]))
        for p in model.parameters():
            p.grad = torch.full_like(p, 1024.0)
        optimizer.grad_scale = torch.tensor(1024.0)
        optimizer.step()
        results.append(model.weight.detach().clone())
    assert torch.equal(*results)


def test_an_empty_group_beside_flat_buffers():
    model = nn.Linear(3, 2)
    optimizer = FusedSGD([{"params": list(model.parameters())}, {"params": []}], lr=0.1)
    optimizer.bind(FlatParameters([model.named_parameters()]))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.1)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_learners_go_on_from_the_state_of_the_one_that_they_come_from(kind):
    options = {} if kind is FusedLAMB else {"momentum": 0.9}
    torch.manual_seed(0)
    alone, model = nn.Linear(4, 3), nn.Linear(4, 3)
    model.load_state_dict(alone.state_dict())
    single, stacked = kind(alone.parameters(), lr=0.1, **options), kind(model.parameters(), lr=0.1, **options)
    x = torch.randn(6, 4)
    for m, optimizer in ((alone, single), (model, stacked)):
        m(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    handle = ddpcore.distribute(model, stacked, ddpcore.SSGD(), learners=2)
    alone(x).square().sum().backward()
    single.step()
    handle.model(torch.stack([x, x])).square().sum().backward()
    stacked.step()
    for one in handle.models:
        for p, row in zip(alone.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(row, p)


def test_a_first_step_that_is_compiled_leaves_its_ratios():
    p = parameter()
    optimizer = FusedLARS([("w", p)], lr=0.1)
    torch.compile(optimizer.step, backend="aot_eager")()
    assert optimizer.trust_ratios()["w"].weight_norm > 0


def test_clips_of_any_kind_of_number():
    p, q = parameter(), parameter()
    q.data.copy_(p)
    q.grad.copy_(p.grad)
    FusedLAMB([p], lr=0.1, trust_clip=np.float32(0.5)).step()
    FusedLAMB([q], lr=0.1, trust_clip=0.5).step()
    assert torch.equal(p, q)
