"""After the first step nothing is allocated and the host reads nothing from a tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcore.optim import FusedLAMB, FusedLARS, FusedSGD

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
