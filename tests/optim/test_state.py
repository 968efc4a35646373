"""States move to and from files, copies and torch's optimizers, and an interrupted run continues bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD, Muon
from ddpcore.parameters.flat import FlatParameters
from helpers.steps import take_steps

MAKES: dict[str, Any] = {
    "sgd": lambda p, **more: FusedSGD(p, **{"lr": 0.1, "momentum": 0.9, "dampening": 0.3, **more}),
    "lars": lambda p, **more: FusedLARS(p, **{"lr": 0.1, "dampening": 0.3, "trust_coefficient": 0.5, **more}),
    "lamb": lambda p, **more: FusedLAMB(p, **{"lr": 0.01, "weight_decay": 0.01, **more}),
}
every = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
KINDS = {
    "float32": (torch.float32, {}),
    "float64": (torch.float64, {}),
    "bfloat16": (torch.bfloat16, {}),
    "bfloat16 with masters": (torch.bfloat16, {"master_weights": True}),
}
kinds = pytest.mark.parametrize("kind", KINDS)
SGDS = [{}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.3}, {"momentum": 0.9, "nesterov": True}]


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2)).to(dtype)


def assert_same(left: nn.Module, right: nn.Module, ulps: float = 0.0) -> None:
    for one, two in zip(left.parameters(), right.parameters(), strict=True):
        if ulps == 0:
            assert torch.equal(one, two)
        else:  # of values of up to 4
            torch.testing.assert_close(one, two, rtol=0, atol=4 * ulps * torch.finfo(one.dtype).eps)


def snapshot(optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((optimizer.state_dict(), optimizer.param_groups))


def same_tree(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right) and left.dtype == right.dtype
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_tree(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same_tree, left, right))
    return bool(left == right)


@pytest.mark.parametrize("gap", [False, True])
@kinds
@every
def test_a_file_in_the_middle_changes_no_bit(make, kind, gap, tmp_path):
    dtype, more = KINDS[kind]
    straight, stopped = net(dtype), net(dtype)
    optimizers = [make(straight.parameters(), **more), make(stopped.parameters(), **more)]
    take_steps(straight, optimizers[0], range(6), gap)
    take_steps(stopped, optimizers[1], range(3), gap)
    torch.save([stopped.state_dict(), optimizers[1].state_dict()], tmp_path / "checkpoint.pt")
    weights, state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed = net(dtype)
    resumed.load_state_dict(weights)
    again = make(resumed.parameters(), lr=77.0, **more)
    again.load_state_dict(state)
    assert same_tree(again.state_dict()["state"], optimizers[1].state_dict()["state"])
    take_steps(resumed, again, range(3, 6), gap)
    assert_same(straight, resumed)
    assert same_tree(again.state_dict()["state"], optimizers[0].state_dict()["state"])
    assert again.param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"]


@every
def test_a_loaded_state_is_a_copy(make):
    """Two optimizers that loaded one state_dict do not share tensors with each other or with it."""
    model = net()
    optimizer = make(model.parameters())
    take_steps(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state)
    models = [net(), net()]
    others = [make(other.parameters()) for other in models]
    for other in others:
        other.load_state_dict(copy.deepcopy(state))
    take_steps(models[0], others[0], range(2, 4))
    assert same_tree(others[1].state_dict()["state"], kept["state"])


@kinds
@every
def test_copies_by_deepcopy_and_pickle_go_on(make, kind):
    dtype, more = KINDS[kind]
    model = net(dtype)
    optimizer = make(model.parameters(), **more)
    take_steps(model, optimizer, range(2))
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    buffer = io.BytesIO()
    torch.save((model, optimizer), buffer)
    buffer.seek(0)
    copies.append(torch.load(buffer, weights_only=False))
    take_steps(model, optimizer, range(2, 5))
    for copied, its_optimizer in copies:
        assert all(its_optimizer.param_groups[0]["params"][i] is p for i, p in enumerate(copied.parameters()))
        take_steps(copied, its_optimizer, range(2, 5))
        assert_same(model, copied)


def test_loaded_states_and_copies_add_no_options() -> None:
    """A rank that joins loads the state of another one, and options must be the same on both."""
    for make in (*MAKES.values(), FusedAdamW, Muon):
        optimizer, loaded = (make([layer.weight for layer in net()]) for _ in range(2))
        before = set(optimizer.defaults), [set(group) for group in optimizer.param_groups]
        loaded.load_state_dict(optimizer.state_dict())
        for one in (loaded, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert (set(one.defaults), [set(group) for group in one.param_groups]) == before


@pytest.mark.parametrize("options", SGDS, ids=str)
def test_sgd_to_torch_and_back(options):
    """Two optimizers of some five roundings a step, over nine steps, of values up to 4."""
    options = {"lr": 0.1, "weight_decay": 0.01, **options}
    straight, crossed = net(), net()
    reference = torch.optim.SGD(straight.parameters(), **options)
    now: torch.optim.Optimizer = FusedSGD(crossed.parameters(), **options)
    for leg, kind in enumerate((torch.optim.SGD, FusedSGD, torch.optim.SGD)):
        take_steps(straight, reference, range(3 * leg, 3 * leg + 3))
        take_steps(crossed, now, range(3 * leg, 3 * leg + 3))
        following = kind(crossed.parameters(), lr=77.0)
        following.load_state_dict(copy.deepcopy(now.state_dict()))
        now = following
    assert_same(straight, crossed, ulps=45)


@pytest.mark.parametrize(("kind", "mode"), [(torch.optim.Adam, "coupled"), (torch.optim.AdamW, "decoupled")])
def test_adam_to_lamb_and_back(kind, mode):
    """Moments and steps are Adam's: a LAMB without ratios continues a run of Adam, and the reverse."""
    straight, crossed = net(torch.float64), net(torch.float64)
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    reference, first = kind(straight.parameters(), **options), kind(crossed.parameters(), **options)
    take_steps(straight, reference, range(9))
    take_steps(crossed, first, range(3))
    lamb = FusedLAMB(crossed.parameters(), decay_mode=mode, trust_clip=(1.0, 1.0))
    lamb.load_state_dict(copy.deepcopy(first.state_dict()))
    assert lamb.param_groups[0]["betas"] == (0.8, 0.95)
    take_steps(crossed, lamb, range(3, 6))
    back = kind(crossed.parameters(), lr=77.0)
    back.load_state_dict(lamb.state_dict())
    take_steps(crossed, back, range(6, 9))
    assert all(float(back.state[param]["step"]) == 9 for param in crossed.parameters())
    assert all(lamb.state[param]["step"].item() == 6 for param in crossed.parameters()), "Adam counts on its own"
    assert_same(straight, crossed, ulps=9 * 20)


@pytest.mark.parametrize("named", [False, True], ids=["indices", "names"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_and_adamw_cross_both_ways(kind, named):
    """The file of torch says whether decay is decoupled, and torch reads ours: groups with and without decay."""
    straight, crossed = net(torch.float64), net(torch.float64)

    def groups(model):
        (weights, biases) = ([p for p in model.named_parameters() if (p[1].ndim > 1) == many] for many in (True, False))
        rows = [weights, biases] if named else [[param for _, param in row] for row in (weights, biases)]
        return [{"params": rows[0], "weight_decay": 0.1}, {"params": rows[1], "weight_decay": 0.0, "lr": 0.02}]

    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-7}
    reference, now = kind(groups(straight), **options), kind(groups(crossed), **options)
    for leg, following in enumerate((FusedAdamW, kind, FusedAdamW, None)):
        take_steps(straight, reference, range(3 * leg, 3 * leg + 3))
        take_steps(crossed, now, range(3 * leg, 3 * leg + 3))
        if following is not None:
            new = following(groups(crossed), lr=77.0)
            new.load_state_dict(copy.deepcopy(now.state_dict()))
            now = new
    assert now.param_groups[0]["decoupled_weight_decay"] == (kind is torch.optim.AdamW)
    assert [group["weight_decay"] for group in now.param_groups] == [0.1, 0.0]
    assert_same(straight, crossed, ulps=12 * 20)


@pytest.mark.parametrize("kind", [FusedSGD, FusedLARS])
def test_momentum_of_16_bits_becomes_that_of_masters(kind):
    """A checkpoint of torch's SGD, without masters, continues with masters."""
    model = net(torch.bfloat16)
    before = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    take_steps(model, before, range(2))
    variant = {"variant": "scaled_lr"} if kind is FusedLARS else {}
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9, master_weights=True, **variant)
    optimizer.load_state_dict(before.state_dict())
    take_steps(model, optimizer, range(2, 4))
    for state in optimizer.state.values():
        assert state["momentum_buffer"].dtype == state["master"].dtype == torch.float32


def test_masters_are_dropped_where_a_parameter_needs_none():
    small, full = net(torch.bfloat16), net()
    before = FusedLAMB(small.parameters(), master_weights=True)
    take_steps(small, before, range(2))
    after = FusedLAMB(full.parameters())
    after.load_state_dict(before.state_dict())
    take_steps(full, after, range(2, 4))
    assert not any("master" in state for state in after.state.values())


BAD: dict[str, tuple[Any, str]] = {
    "shape": (
        lambda d: d["state"][1].update(momentum_buffer=torch.zeros(4)),
        r"momentum_buffer of parameter 1 .* \(4,\)",
    ),
    "step": (lambda d: d["state"][2].update(step=torch.zeros(3)), "step of parameter 2"),
    "lr": (lambda d: d["param_groups"][0].update(lr=-1.0), "lr is -1.0"),
    "momentum": (lambda d: d["param_groups"][1].update(momentum=float("nan")), "momentum is nan"),
    "norm": (lambda d: d["param_groups"][1].update(max_grad_norm=2.0), "max_grad_norm is 2.0 in one group and None"),
    "groups": (lambda d: d["param_groups"].pop(), "different number of parameter groups"),
    "sizes": (lambda d: d["param_groups"][0]["params"].pop(), "doesn't match the size of"),
    "variant": (lambda d: d["param_groups"][0].update(variant="best"), "variant is 'best'"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_state_that_does_not_fit_changes_nothing(fault):
    model = net()
    params = list(model.parameters())
    optimizer = FusedLARS([{"params": params[:2]}, {"params": params[2:], "lr": 0.2}], lr=0.1)
    take_steps(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    spoil, message = BAD[fault]
    spoil(state)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert same_tree(snapshot(optimizer)[0], before[0])
    take_steps(model, optimizer, range(2, 3))


@pytest.mark.parametrize("clear", ["all", "new dictionary", "one entry", "inside of one entry"])
@every
def test_a_state_that_is_cleared_begins_anew(make, clear):
    """As in torch, users may reset the momentum by clearing ``optimizer.state``."""
    model, fresh = net(), net()
    optimizer = make(model.parameters())
    take_steps(model, optimizer, range(2))
    fresh.load_state_dict(model.state_dict())
    params = list(model.parameters())
    if clear == "all":
        optimizer.state.clear()
    elif clear == "new dictionary":
        optimizer.state = type(optimizer.state)(dict)
    for param in params:
        if clear == "one entry":
            del optimizer.state[param]
        elif clear == "inside of one entry":
            optimizer.state[param].clear()
    take_steps(model, optimizer, range(2, 4))
    take_steps(fresh, make(fresh.parameters()), range(2, 4))
    assert_same(model, fresh)


@every
def test_parameters_that_join_and_skip_step_as_if_alone(make):
    """The result is compared with one optimizer per parameter, each with its own count of steps."""
    together, apart = net(), net()
    optimizer = make(list(together.parameters())[:3])
    alone = [make([param]) for param in apart.parameters()]
    for step in range(7):
        if step == 2:
            optimizer.add_param_group({"params": list(together.parameters())[3:]})
        if step == 4:  # one of those that count their steps together gets a group of its own
            optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()]})
        generator = torch.Generator().manual_seed(step)
        for index, (one, two) in enumerate(zip(together.parameters(), apart.parameters(), strict=True)):
            takes_part = (index + step) % 3 != 0 and (index != 3 or step >= 2)
            one.grad = torch.randn(one.shape, generator=generator) if takes_part else None
            two.grad = None if one.grad is None else one.grad.clone()
        optimizer.step()
        for other in alone:
            other.step()
    assert_same(together, apart)


def test_momentum_of_some_of_torchs_parameters_survives_bind():
    """A state of torch's SGD in which one parameter never had a gradient, loaded into a bound optimizer."""
    ends = []
    for way in ("torch", "list", "bound"):
        model = net()
        before = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.3)
        model[0].weight.grad = torch.ones_like(model[0].weight)
        before.step()
        optimizer = before if way == "torch" else FusedSGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.3)
        if way == "bound":
            optimizer.bind(FlatParameters([model.named_parameters()]))
        if way != "torch":
            optimizer.load_state_dict(before.state_dict())
        take_steps(model, optimizer, range(3))
        ends.append(model)
    assert_same(ends[0], ends[1], ulps=15)  # three steps of some five roundings
    assert_same(ends[1], ends[2])


@pytest.mark.parametrize("make", [*MAKES.values(), Muon], ids=[*MAKES, "muon"])
def test_a_later_group_begins_at_the_rate_that_was_given(make: Any) -> None:
    """Schedulers write into the given tensor, which the first group keeps; a resumed run has the rate of its own."""
    for is_resumed in (False, True):
        first, late = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
        optimizer = make([first], lr=(rate := torch.tensor(0.5)))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        assert optimizer.param_groups[0]["lr"] is rate
        first.grad = torch.ones(2, 2)
        optimizer.step()
        scheduler.step()
        if is_resumed:
            saved = optimizer.state_dict()
            optimizer = make([first], lr=torch.tensor(0.5))
            optimizer.load_state_dict(saved)
        optimizer.add_param_group({"params": [late]})
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
        rates = [group["lr"] for group in optimizer.param_groups]
        assert [float(one) for one in rates] == [0.25, 0.5, 0.5]
        assert len(set(map(id, rates))) == 3
