"""After the first step nothing is allocated and the host reads nothing from a tensor."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from ddpcore.optim import FusedLAMB, FusedLARS, FusedSGD, base
from ddpcore.optim.batch import on_device

ALLOCATIONS = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::zeros", "aten::clone", "aten::copy_"}
READS = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"}


def names_of_a_step(optimizer: torch.optim.Optimizer) -> set[str]:
    with torch.profiler.profile() as profile:
        optimizer.step()
    return {event.name for event in profile.events()}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("kind", [FusedSGD, FusedLARS, FusedLAMB])
def test_later_steps_allocate_and_read_nothing(kind, masters, lr, clip):
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(torch.bfloat16 if masters else torch.float32)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    options = {} if kind is FusedLAMB else {"momentum": 0.9}
    optimizer = kind(model.parameters(), lr=lr, max_grad_norm=clip, master_weights=masters, **options)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    first = names_of_a_step(optimizer)
    assert first & ALLOCATIONS, "the first step makes the state, so the profiler sees allocations"
    later = names_of_a_step(optimizer)
    assert any(name.startswith("ddpcore::") for name in later)
    assert not later & (ALLOCATIONS | READS)


@pytest.mark.parametrize("kind", [FusedSGD, FusedLARS, FusedLAMB])
def test_schedules_of_options_allocate_nothing(kind):
    """OneCycleLR and CyclicLR change momentum or betas at every step."""
    model = nn.Linear(5, 7)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.param_groups[0].update({} if kind is FusedLAMB else {"momentum": 0.5})
    optimizer.step()
    optimizer.param_groups[0].update({"betas": (0.8, 0.9)} if kind is FusedLAMB else {"momentum": 0.6})
    optimizer.param_groups[0].update({"weight_decay": 0.1, "lr": 0.2})
    assert not names_of_a_step(optimizer) & (ALLOCATIONS | READS)


def test_what_a_captured_step_writes_into_stays_alive(monkeypatch):
    """A graph keeps addresses: a later step of other parameters must use other buffers."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer = FusedLARS(model.parameters())
    optimizer.step()

    def buffers():
        batch = optimizer._kept["plan"].batches[0]
        return [weakref.ref(tensor) for tensor in (batch.scratch, batch.trust, batch.norm, *batch.steps)]

    held = []
    for capturing in (False, True):
        monkeypatch.setattr(base, "is_capturing", lambda tensor, capturing=capturing: capturing)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        held.append(buffers())
        model[0].weight.grad = None
        monkeypatch.setattr(base, "is_capturing", lambda tensor: False)
        optimizer.step()
    dropped, kept = ([ref() is not None for ref in refs] for refs in held)
    assert all(kept) and not any(dropped[:3])


def test_only_the_cpu_waits_for_a_number():
    """CPU kernels read the value at once, so the copy must be complete; GPU kernels are queued behind the copy."""

    class Number:
        device = torch.device("meta")

        def to(self, device, non_blocking):
            return device.type, non_blocking

    assert on_device(Number(), torch.device("cpu")) == ("cpu", False)
    assert on_device(Number(), torch.device("cuda", 0)) == ("cuda", True)
