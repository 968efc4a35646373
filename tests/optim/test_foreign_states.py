"""State dicts of other optimizers: missing options keep their values, buffers of another rule are refused."""

from __future__ import annotations

import pickle
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD, Muon, param_groups


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


def muon_adamw(params: Any, **options: Any) -> Muon:
    return Muon([{"params": params, "rule": "adamw"}], **options)


EPS = {"eps": 1e-3}
OURS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (FusedSGD, {"momentum": 0.9}),
    **{f"lars {one}": (FusedLARS, {"variant": one}) for one in ("you2017", "scaled_grad", "scaled_lr")},
    "adamw": (FusedAdamW, EPS),
    **{f"lamb {one}": (FusedLAMB, {"variant": one, **EPS}) for one in ("paper", "nvlamb", "undebiased")},
    "muon": (Muon, {"momentum": 0.9}),
    "muon, rule adamw": (muon_adamw, {"adamw_eps": 1e-3}),
}
TORCHS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Muon": (torch.optim.Muon, {"momentum": 0.9}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9}),
    **{name: (getattr(torch.optim, name), EPS) for name in ("Adam", "AdamW", "RAdam", "NAdam", "Adamax", "Adadelta")},
    **{name: (getattr(torch.optim, name), {}) for name in ("Adagrad", "ASGD", "Rprop")},
}


def run(make: Any, options: dict[str, Any], steps: int = 2) -> tuple[Any, list[nn.Parameter]]:
    """An optimizer after some steps, with the same gradients for all."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 3, generator=generator)) for _ in range(2)]
    optimizer = make(params, lr=0.1, **{"weight_decay": 0.0} if make is not torch.optim.Rprop else {}, **options)
    for _ in range(steps):
        give(params, generator)
        optimizer.step()
    return optimizer, params


def give(params: list[nn.Parameter], generator: torch.Generator) -> None:
    for param in params:
        param.grad = torch.randn(4, 3, generator=generator)


def buffers(optimizer: Any) -> dict[tuple[int, str], torch.Tensor]:
    """The states besides step counts."""
    states = enumerate(optimizer.state.values())
    return {(index, key): value for index, state in states for key, value in state.items() if key != "step"}


def test_every_pair_of_rules_is_right_or_refused() -> None:
    """A state is loaded if it is what the rule itself would have after these gradients, and then goes on as the rule.

    One pair is refused all the same: a group of Muon with its rule adamw has the eps of the matrices, too.
    """
    accepted = set()
    for (theirs, (source, options)), (ours, (target, own)) in product({**OURS, **TORCHS}.items(), OURS.items()):
        first, _ = run(source, options)
        is_own = source is target or {source, target} == {Muon, muon_adamw}
        twin, expected = run(source, options) if is_own else run(target, own)  # loading takes variant and rule
        mine, needed = buffers(first), buffers(twin)
        same = mine.keys() == needed.keys() and all(torch.allclose(mine[key], needed[key], 1e-5) for key in mine)
        second, params = run(target, {"variant": own["variant"]} if "variant" in own else {}, steps=0)
        if not same or (theirs, target) in [("muon, rule adamw", FusedAdamW), ("muon, rule adamw", FusedLAMB)]:
            with pytest.raises(ValueError, match=r"^state_dict: "):
                second.load_state_dict(first.state_dict())
            assert not second.state
            continue
        accepted.add((theirs, ours))
        second.load_state_dict(first.state_dict())
        for param, weights in zip(params, expected, strict=True):
            param.data.copy_(weights)
        for each, its in ((second, params), (twin, expected)):
            give(its, torch.Generator().manual_seed(1))
            each.step()
        torch.testing.assert_close(params, expected, rtol=1e-4, atol=1e-5, msg=f"{theirs} into {ours}")
    momentum = {("sgd", "SGD", "lars scaled_lr"): ("sgd", "lars scaled_lr"), ("muon", "Muon"): ("muon",)}
    moments = "adamw", "lamb paper", "lamb nvlamb", "lamb undebiased"
    lars = tuple(name for name in OURS if "lars" in name)
    adam = {(*moments, "Adam", "AdamW", "RAdam"): (*moments, "muon, rule adamw")}
    muon = "muon", "muon, rule adamw"
    pairs = {**momentum, **adam, lars: lars, muon: muon}
    assert accepted == {pair for left, right in pairs.items() for pair in product(left, right)}


def test_momentum_of_other_libraries_is_of_its_variant() -> None:
    """LARS of timm and torch-optimizer has the momentum of ``scaled_grad``, and no option says so."""
    model = net()
    saved = stepped(model, FusedLARS(model.parameters(), lr=0.1, variant="scaled_grad"))
    for name in ("trust_coeff", "trust_coefficient"):
        theirs = {**saved, "param_groups": [dict(saved["param_groups"][0])]}
        del theirs["param_groups"][0]["variant"]
        theirs["param_groups"][0][name] = theirs["param_groups"][0].pop("trust_coefficient")
        FusedLARS(model.parameters(), variant="scaled_grad").load_state_dict(theirs)
        for optimizer in (FusedSGD(model.parameters(), momentum=0.9), FusedLARS(model.parameters())):
            with pytest.raises(ValueError, match="states of group 0 are of variant 'scaled_grad' and not"):
                optimizer.load_state_dict(theirs)
