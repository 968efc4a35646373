"""16-bit parameters with fp32 masters follow an fp32 run; writes to a parameter count; norms are up to date."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore import ops
from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD
from ddpcore.parameters.flat import FlatParameters

MAKES: dict[str, Any] = {
    "sgd": lambda p, **more: FusedSGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, **more),
    "adamw": lambda p, **more: FusedAdamW(p, lr=0.01, weight_decay=0.01, **more),
    "lars": lambda p, **more: FusedLARS(p, lr=0.1, weight_decay=0.01, trust_coefficient=0.5, **more),
    "lamb": lambda p, **more: FusedLAMB(p, lr=0.01, weight_decay=0.01, **more),
}
every = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 70))


def give(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> None:
    """Gradients that have the same values in every type: rounded to 16 bits."""
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad = torch.randn(param.shape[-2:], generator=generator).to(dtype).to(param.dtype).to(param.device)


@half
@every
def test_masters_take_the_steps_of_an_fp32_run(make, dtype, device):
    """Bit for bit: the same arithmetic on the same numbers, and the parameter is the master rounded."""
    full = net().to(device).to(dtype).float()
    model = net().to(device).to(dtype)
    optimizers = [make(full.parameters()), make(model.parameters(), master_weights=True)]
    for step in range(10):
        give(full, step, dtype)
        give(model, step, dtype)
        for optimizer in optimizers:
            optimizer.step()
    for exact, param in zip(full.parameters(), model.parameters(), strict=True):
        state = optimizers[1].state[param]
        assert state["master"].dtype == torch.float32
        assert torch.equal(state["master"], exact)
        assert torch.equal(param, exact.to(dtype))
        for name in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
            assert name not in state or torch.equal(state[name], optimizers[0].state[exact][name])


def test_small_steps_add_up_in_masters_only():
    """1 - 2^-12 is 1 in bfloat16: a hundred such steps are lost without a master and kept with one."""
    ends = []
    for master_weights in (False, True):
        param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = FusedSGD([param], lr=2.0**-12, master_weights=master_weights)
        for _ in range(100):
            param.grad = torch.ones_like(param)
            optimizer.step()
        ends.append(param[0].item())
    assert ends == [1.0, torch.tensor(1 - 100 * 2.0**-12).to(torch.bfloat16).item()]


@half
def test_without_masters_as_torch(dtype):
    """torch rounds every intermediate of a 16-bit step, some five, and ours one: five ULPs a step, of at most 4."""
    ours, theirs = net().to(dtype), net().to(dtype)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    optimizers = [FusedSGD(ours.parameters(), **options), torch.optim.SGD(theirs.parameters(), **options)]
    for step in range(3):
        give(ours, step, dtype)
        give(theirs, step, dtype)
        for optimizer in optimizers:
            optimizer.step()
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (one.float() - two.float()).abs().max() <= 3 * 5 * torch.finfo(dtype).eps * 4


def by_data(model: nn.Module, values: list[Tensor]) -> None:
    for param, value in zip(model.parameters(), values, strict=True):
        param.data = value.clone()


def by_copy(model: nn.Module, values: list[Tensor]) -> None:
    with torch.no_grad():
        for param, value in zip(model.parameters(), values, strict=True):
            param.copy_(value)


def by_load(model: nn.Module, values: list[Tensor]) -> None:
    model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))


def by_flat(model: nn.Module, values: list[Tensor]) -> None:
    flat = FlatParameters([model.named_parameters()])
    for name, view in zip(flat.names, flat.views_of(flat.param_LP), strict=True):
        view.copy_(dict(zip(model.state_dict(), values, strict=True))[name])


def by_mix(model: nn.Module, values: list[Tensor]) -> None:
    """The average with a neighbour for which the result is the given values."""
    with torch.no_grad():
        for param, value in zip(model.parameters(), values, strict=True):
            ops.mix_(param.view(-1), [value.flatten()], 0.0, [1.0])


WRITERS = [by_data, by_copy, by_load, by_flat, by_mix]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "bfloat16 with masters"])
@every
def test_what_others_write_is_taken_up_at_the_next_step(make, kind, write):
    """The result is that of a new optimizer with these weights and the old momentum: weight, master and ratio."""
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    more = {"master_weights": kind.endswith("masters")}
    model = net().to(dtype)
    optimizer = make(model.parameters(), **more)
    for step in range(3):
        give(model, step, dtype)
        optimizer.step()
    values = [torch.randn(param.shape).to(dtype) * 3 for param in model.parameters()]
    write(model, values)
    fresh = net().to(dtype)
    by_copy(fresh, values)
    other = make(fresh.parameters(), **more)
    state = copy.deepcopy(optimizer.state_dict())
    for entry, value in zip(state["state"].values(), values, strict=True):
        if "master" in entry:
            entry["master"] = value.float()
    other.load_state_dict(state)
    for step in range(3, 5):
        give(model, step, dtype)
        give(fresh, step, dtype)
        optimizer.step()
        other.step()
    for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, two)
    if isinstance(optimizer, (FusedLARS, FusedLAMB)):
        assert optimizer.trust_ratios() == other.trust_ratios()
        norms = [row.weight_norm for row in optimizer.trust_ratios().values()]
        assert min(norms[0], norms[2]) > 10, "of the weights that were written, not of those that it had"


def test_one_element_that_is_written_is_taken_up_alone():
    param = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = FusedSGD([param], lr=2.0**-12, master_weights=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.data[3] = 5.0
    optimizer.step()
    expected = torch.full((8,), 1 - 2 * 2.0**-12)
    expected[3] = 5 - 2.0**-12
    assert torch.equal(optimizer.state[param]["master"], expected)


@pytest.mark.parametrize("make", [MAKES["lars"], MAKES["lamb"]], ids=["lars", "lamb"])
def test_ratios_after_an_average_with_neighbours(make):
    """Gossip moves the weights between two steps: norms are those of the mixed weights."""
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2))
    optimizer = make(model.named_parameters())
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Complete()), learners=2)
    for step in range(3):
        inputs = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        outputs = handle.model(inputs)
        learners = [dict(one.named_parameters()) for one in handle.models]
        mixed = {name: torch.stack([one[name].detach() for one in learners]).mean(0) for name in learners[0]}
        (outputs[0].square().mean() + outputs[1].abs().mean()).backward()
        optimizer.step()
        for name, rows in optimizer.trust_ratios().items():
            for row in rows:
                assert row.weight_norm == pytest.approx(float(mixed[name].double().norm()), rel=1e-6)
