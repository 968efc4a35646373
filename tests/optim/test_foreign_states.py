"""State dicts of other optimizers: missing options keep their values, buffers of another rule are refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD, param_groups


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer.state_dict()


def test_each_group_keeps_what_the_file_does_not_say() -> None:
    model = net()
    theirs = stepped(model, torch.optim.SGD(param_groups(model, 0.1), lr=0.3, momentum=0.8))
    for group in theirs["param_groups"]:
        group.pop("always_adapt", None)  # of param_groups, which torch keeps
    ours = FusedLARS(param_groups(model, 0.5), lr=1.0, variant="scaled_lr", trust_coefficient=0.7)
    ours.load_state_dict(theirs)
    names = ("lr", "momentum", "weight_decay", "always_adapt", "trust_coefficient")
    assert [tuple(group[name] for name in names) for group in ours.param_groups] == [
        (0.3, 0.8, 0.1, True, 0.7),
        (0.3, 0.8, 0.0, False, 0.7),
    ]
    theirs = stepped(model, torch.optim.AdamW(model.parameters(), lr=0.3))
    lamb = FusedLAMB(model.parameters(), trust_clip=(0.5, 2.0), decay_mode="decoupled")
    lamb.load_state_dict(theirs)
    assert (lamb.param_groups[0]["trust_clip"], lamb.param_groups[0]["decay_mode"]) == ((0.5, 2.0), "decoupled")


FOREIGN: dict[str, tuple[Any, Any, str]] = {
    "sgd into lamb": (FusedSGD, FusedLAMB, "parameter 0 has momentum_buffer, .* keeps exp_avg, exp_avg_sq"),
    "adam into sgd": (torch.optim.Adam, FusedSGD, "parameter 0 has exp_avg, exp_avg_sq, .* keeps momentum_buffer"),
    "amsgrad into lamb": (torch.optim.Adam, FusedLAMB, "parameter 0 has max_exp_avg_sq"),
    "amsgrad into adamw": (torch.optim.Adam, FusedAdamW, "parameter 0 has max_exp_avg_sq"),
    "sgd into adamw": (FusedSGD, FusedAdamW, "parameter 0 has momentum_buffer, .* keeps exp_avg, exp_avg_sq"),
    "sgd into lars": (torch.optim.SGD, FusedLARS, "variant 'scaled_lr' and not 'you2017'"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_state_of_another_rule_is_refused(case: str) -> None:
    theirs, ours, says = FOREIGN[case]
    more = {"amsgrad": True} if "amsgrad" in case else {"momentum": 0.9} if "sgd" in case.split()[0] else {}
    model = net()
    saved = stepped(model, theirs(model.parameters(), lr=0.1, **more))
    optimizer = ours(model.parameters(), lr=0.2, **({"momentum": 0.5} if ours in (FusedSGD, FusedLARS) else {}))
    with pytest.raises(ValueError, match=says):
        optimizer.load_state_dict(saved)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize("ours", [FusedAdamW, FusedLAMB])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step": None}, "parameter 0 lacks step: load all of its state"),
        ({"exp_avg": None}, "parameter 0 lacks exp_avg: load all of its state"),
        ({"step": torch.tensor(float("nan"))}, "step of parameter 0 is nan: it must be a number from 0 on"),
        ({"step": -1}, "step of parameter 0 is -1: it must be a number from 0 on"),
        ({"exp_avg": torch.zeros(9, 6, dtype=torch.complex64)}, "exp_avg of parameter 0 is torch.complex64"),
        ({"exp_avg_sq": torch.zeros(9, 6, dtype=torch.int64)}, "exp_avg_sq of parameter 0 is torch.int64"),
    ],
)
def test_a_state_that_is_damaged_is_refused(change: dict[str, Any], says: str, ours: Any) -> None:
    """None: the entry is missing."""
    model = net()
    saved = stepped(model, ours(model.parameters(), lr=0.1))
    saved["state"][0] = {k: v for k, v in {**saved["state"][0], **change}.items() if v is not None}
    optimizer = ours(model.parameters(), lr=0.2)
    with pytest.raises(ValueError, match=says):
        optimizer.load_state_dict(saved)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize("ours", [FusedSGD, FusedAdamW, FusedLARS, FusedLAMB])
def test_groups_that_cannot_be_stepped(ours: Any) -> None:
    one, two = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = ours([one], lr=0.1)
    with pytest.raises(ValueError, match="differentiable is True: the fused step has no gradient"):
        optimizer.add_param_group({"params": [two], "differentiable": True})
    with pytest.raises(ValueError, match="parameter 1 is twice in its group: name it once"), pytest.warns(UserWarning):
        optimizer.add_param_group({"params": [two, two]})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["weight_decay"] = -1.0  # by a program, before the first step
    one.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"weight_decay is -1\.0"):
        optimizer.step()
    assert torch.equal(one, torch.ones(3))


@pytest.mark.parametrize("ours", [FusedSGD, FusedAdamW, FusedLARS, FusedLAMB])
def test_options_of_torch_alone_are_left_out(ours: Any) -> None:
    """Those that say how torch computes a step; a group of a loaded state has the keys of a new group."""
    model = net()
    theirs = torch.optim.SGD if ours in (FusedSGD, FusedLARS) else torch.optim.Adam
    saved = stepped(model, theirs(model.parameters(), lr=0.1, foreach=True))
    optimizer = ours(model.parameters())
    expected = {*optimizer.param_groups[0], *saved["param_groups"][0]}
    expected -= {"capturable", "differentiable", "foreach", "fused"}
    names = set(optimizer.defaults)
    optimizer.load_state_dict(saved)
    assert set(optimizer.param_groups[0]) == expected and set(optimizer.defaults) == names
    optimizer.load_state_dict(optimizer.state_dict())
    for one in (optimizer, pickle.loads(pickle.dumps(optimizer))):
        assert set(one.param_groups[0]) == expected and set(one.defaults) == names
    saved["param_groups"][0]["differentiable"] = True
    with pytest.raises(ValueError, match="differentiable is True: the fused step has no gradient"):
        optimizer.load_state_dict(saved)


def test_a_state_names_its_variant() -> None:
    model = net()
    saved = stepped(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    optimizer = FusedLARS(model.parameters(), variant="scaled_lr")
    optimizer.load_state_dict(saved)
    stepped(model, optimizer)
    other = FusedLARS(model.parameters())
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["variant"] == "scaled_lr"
