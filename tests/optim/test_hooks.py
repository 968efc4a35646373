"""Hooks are called as torch calls them, although a step without hooks skips torch's wrapper."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddpcore.optim import FusedLAMB, FusedLARS, FusedSGD
from ddpcore.storage.serialization import tensors_of

OPTIMIZERS = [FusedSGD, FusedLARS, FusedLAMB]


def parameter() -> nn.Parameter:
    result = nn.Parameter(torch.randn(5))
    result.grad = torch.randn(5)
    return result


class Patient(FusedSGD):
    """A user's subclass with its own ``step``."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("kind", [*OPTIMIZERS, Patient])
def test_every_step_calls_every_hook_once(kind):
    optimizer, calls = kind([parameter()], lr=0.1), []
    optimizer.step()
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step()
    optimizer.step()
    assert calls == ["before", "after"] * 2


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_hook_of_state_dict_edits_the_copy(kind):
    optimizer = kind([parameter()], lr=0.1)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    handle = optimizer.register_state_dict_post_hook(lambda _, state: [x.zero_() for x in tensors_of(state)] and None)
    edited = optimizer.state_dict()
    handle.remove()
    assert not any(tensor.any() for tensor in tensors_of(edited))
    pairs = zip(tensors_of(optimizer.state_dict()), tensors_of(before), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_global_hooks_are_called():
    calls = []
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("after"))
    try:
        FusedSGD([parameter()], lr=0.1).step()
    finally:
        handle.remove()
    assert calls == ["after"]


def test_a_hook_that_comes_after_compiling_is_called():
    optimizer, calls = FusedSGD([parameter()], lr=0.1, momentum=0.9), []
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    compiled()
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    compiled()
    assert calls == ["after"]


def test_the_profiler_sees_the_step():
    optimizer = FusedLAMB([parameter()], lr=0.1)
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert "Optimizer.step#FusedLAMB.step" in {event.name for event in profile.events()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_hook_may_rearrange_the_state_that_is_loaded(kind):
    """By name, as torch's documentation of register_load_state_dict_pre_hook does it."""
    first, second = parameter(), parameter()
    optimizer = kind([("a", first), ("b", second)], lr=0.1, **({} if kind is FusedLAMB else {"momentum": 0.9}))
    optimizer.step()
    second.grad = None
    optimizer.step()  # so that the steps differ too
    saved = optimizer.state_dict()

    def by_name(new, state_dict):
        (group,) = state_dict["param_groups"]
        number_of = dict(zip(group["param_names"], group["params"], strict=True))
        states = {i: state_dict["state"][number_of[name]] for i, name in enumerate(new.param_groups[0]["param_names"])}
        return {"state": states, "param_groups": [{**group, "param_names": group["param_names"][::-1]}]}

    turned = kind([("b", parameter()), ("a", parameter())], lr=0.1)
    turned.register_load_state_dict_pre_hook(by_name)
    turned.load_state_dict(saved)
    (b, a), (old_a, old_b) = turned.param_groups[0]["params"], (first, second)
    for new, old in ((a, old_a), (b, old_b)):
        assert turned.state[new].keys() == optimizer.state[old].keys()
        for name, value in optimizer.state[old].items():
            assert torch.equal(turned.state[new][name], value), name
