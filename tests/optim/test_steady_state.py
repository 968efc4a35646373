"""After the first step nothing is allocated and the host reads nothing from a tensor."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD, Muon, checks, states
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
        monkeypatch.setattr(checks, "is_capturing", lambda tensor, capturing=capturing: capturing)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        held.append(buffers())
        model[0].weight.grad = None
        monkeypatch.setattr(checks, "is_capturing", lambda tensor: False)
        optimizer.step()
    dropped, kept = ([ref() is not None for ref in refs] for refs in held)
    assert all(kept) and not any(dropped[:3])


class Capturing:
    """Stands for a CUDA graph that captures: on the CPU the calls inside run at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def __enter__(self) -> None:
        for module in (checks, states):
            self._patch.setattr(module, "is_capturing", lambda tensor: True)

    def __exit__(self, *_: object) -> None:
        for module in (checks, states):
            self._patch.setattr(module, "is_capturing", lambda tensor: False)


def trained(kind: type[torch.optim.Optimizer], **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(5, 7, bias=kind is not Muon)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model, kind(model.named_parameters(), **options)


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (FusedSGD, {"momentum": torch.tensor(0.9)}, "momentum"),
        (FusedSGD, {"lr": torch.tensor(0.1), "weight_decay": torch.tensor(0.1)}, "weight_decay"),
        (FusedAdamW, {"betas": (0.9, torch.tensor(0.99))}, "betas"),
        (FusedLAMB, {"weight_decay": torch.tensor(0.1)}, "weight_decay"),
        (FusedLARS, {"weight_decay": torch.tensor(0.1)}, "weight_decay"),
        (Muon, {"lr": torch.tensor(0.1)}, "lr"),
        (Muon, {"momentum": torch.tensor(0.9)}, "momentum"),
    ],
)
def test_a_tensor_that_replays_would_not_read_is_refused(kind, options, name, monkeypatch):
    model, optimizer = trained(kind, **options)
    optimizer.step()  # without a graph each step reads it
    before = model.weight.detach().clone()
    with Capturing(monkeypatch), pytest.raises(RuntimeError, match=f"^{name} is a tensor, .*: pass a number$"):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_a_rate_on_another_device_is_refused(monkeypatch):
    _, optimizer = trained(FusedSGD, lr=torch.tensor(0.1))
    with Capturing(monkeypatch):
        optimizer.step()
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
        with pytest.raises(RuntimeError, match=r"^lr is a tensor, .*: put it on the device of the parameters$"):
            optimizer.step()


@pytest.mark.parametrize("kind", [FusedSGD, Muon])
def test_a_parameter_that_no_replay_would_step_is_refused(kind, monkeypatch):
    model, optimizer = trained(kind)
    optimizer.step()
    model.weight.grad = None
    with Capturing(monkeypatch):
        with pytest.raises(RuntimeError, match=r"^parameter weight of a group has no gradient"):
            optimizer.step()
        model.weight.requires_grad_(False)
        optimizer.step()


@pytest.mark.parametrize("kind", [FusedAdamW, Muon])
def test_a_state_is_not_loaded_under_a_graph(kind, monkeypatch):
    _, optimizer = trained(kind)
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state_dict=state)  # as torch.distributed.checkpoint calls it
    with Capturing(monkeypatch):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"^load_state_dict: a CUDA graph has captured a step"):
        optimizer.load_state_dict(state)
    other = trained(kind)[1]
    other.load_state_dict(optimizer.state_dict())
    copy.deepcopy(optimizer).load_state_dict(state)  # no graph has captured a copy


@pytest.mark.parametrize("kind", [FusedSGD, FusedAdamW])
def test_steps_are_counted_beyond_what_16_bits_hold(kind):
    """bfloat16 stops at 256, because 257 rounds to 256."""
    model = nn.Linear(5, 7).to(torch.bfloat16)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    momentum = {} if kind is FusedAdamW else {"momentum": 0.9}
    optimizer = kind(model.parameters(), lr=0.0, state_dtype=torch.bfloat16, **momentum)
    optimizer.step()
    state = optimizer.state_dict()
    for one in state["state"].values():
        one["step"] = torch.tensor(256.0, dtype=torch.bfloat16)
    optimizer.load_state_dict(state)
    for _ in range(3):
        optimizer.step()
    assert {float(optimizer.state[p]["step"]) for p in model.parameters()} == {259.0}


def test_only_the_cpu_waits_for_a_number():
    """CPU kernels read the value at once, so the copy must be complete; GPU kernels are queued behind the copy."""

    class Number:
        device = torch.device("meta")

        def to(self, device, non_blocking):
            return device.type, non_blocking

    assert on_device(Number(), torch.device("cpu")) == ("cpu", False)
    assert on_device(Number(), torch.device("cuda", 0)) == ("cuda", True)
