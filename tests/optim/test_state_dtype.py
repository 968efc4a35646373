"""``state_dtype=torch.bfloat16``: the same bits in every form of a run, states that move, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD, build_optimizer
from ddpcore.parameters.flat import FlatParameters
from helpers.steps import take_steps

BF16 = {"state_dtype": torch.bfloat16}
MAKES: dict[str, Any] = {
    "sgd": lambda p, **more: FusedSGD(p, **{"lr": 0.1, "momentum": 0.9, "dampening": 0.3, **BF16, **more}),
    "lars": lambda p, **more: FusedLARS(p, **{"lr": 0.1, "trust_coefficient": 0.5, **BF16, **more}),
    "lamb": lambda p, **more: FusedLAMB(p, **{"lr": 0.01, "weight_decay": 0.01, **BF16, **more}),
    "adamw": lambda p, **more: FusedAdamW(p, **{"lr": 0.01, **BF16, **more}),
}
every = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(60, 90), nn.Linear(90, 2)).to(dtype)


def states(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    return list(optimizer.state_dict()["state"].values())


def assert_same(left: tuple[nn.Module, Any], right: tuple[nn.Module, Any]) -> None:
    """Weights and states of both, in the order of the parameters."""
    for one, two in zip(left[0].parameters(), right[0].parameters(), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(states(left[1]), states(right[1]), strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            assert torch.equal(value, two[name]) and value.dtype == two[name].dtype, name


@every_dtype
@every
def test_states_have_16_bits(make, dtype):
    model = net(dtype)
    optimizer = make(model.parameters())
    take_steps(model, optimizer, range(2))
    for state in optimizer.state.values():
        assert {value.dtype for name, value in state.items() if name != "step"} == {torch.bfloat16}
    assert optimizer.param_groups[0]["state_dtype"] == "bfloat16"


@pytest.mark.parametrize("gap", [False, True])
@every_dtype
@every
def test_a_file_in_the_middle_changes_no_bit(make, dtype, gap, tmp_path):
    straight, stopped = net(dtype), net(dtype)
    optimizers = [make(straight.parameters()), make(stopped.parameters())]
    take_steps(straight, optimizers[0], range(6), gap)
    take_steps(stopped, optimizers[1], range(3), gap)
    torch.save([stopped.state_dict(), optimizers[1].state_dict()], tmp_path / "checkpoint.pt")
    weights, state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed = net(dtype)
    resumed.load_state_dict(weights)
    again = make(resumed.parameters(), lr=77.0, state_dtype=torch.float32)  # the file says bfloat16
    again.load_state_dict(state)
    assert_same((stopped, optimizers[1]), (resumed, again))
    take_steps(resumed, again, range(3, 6), gap)
    assert_same((straight, optimizers[0]), (resumed, again))
    copies = copy.deepcopy((resumed, again))
    take_steps(*copies, range(6, 8), gap)
    take_steps(straight, optimizers[0], range(6, 8), gap)
    assert_same((straight, optimizers[0]), copies)


@every_dtype
@every
def test_a_flat_buffer_has_the_bits_of_a_list(make, dtype):
    """Also where its order changes, where gradients are missing, and with two groups."""
    models = [net(dtype), net(dtype)]
    groups = [[list(model.parameters())[start::2] for start in (0, 1)] for model in models]
    optimizers = [make([{"params": even}, {"params": odd, "lr": 0.03}]) for even, odd in groups]
    flat = FlatParameters([models[1].named_parameters()])
    optimizers[1].bind(flat)
    for which, gap in ((range(2), False), (range(2, 4), True), (range(4, 6), False)):
        for model, optimizer in zip(models, optimizers, strict=True):
            take_steps(model, optimizer, which, gap)
        flat.reorder([2, 0, 3, 1])
    assert_same((models[0], optimizers[0]), (models[1], optimizers[1]))


@pytest.mark.parametrize("norm", [None, 0.5])
@every
def test_virtual_learners_have_the_bits_of_optimizers_of_their_own(make, norm):
    """All learners draw the same bits, so ranks that have the same weights and gradients keep the same weights."""
    rows, alone = [net() for _ in range(3)], [net() for _ in range(3)]
    flat = FlatParameters([row.named_parameters() for row in rows])
    params = [list(row.parameters()) for row in rows]
    groups = [
        {"params": [p for own in params for p in own[:2]]},
        {"params": [p for own in params for p in own[2:]], "lr": 0.02},
    ]
    together = make(groups, max_grad_norm=norm)
    together.bind(flat)
    singles = [
        make(
            [{"params": list(m.parameters())[:2]}, {"params": list(m.parameters())[2:], "lr": 0.02}], max_grad_norm=norm
        )
        for m in alone
    ]
    for step in range(4):
        for learner, (row, single) in enumerate(zip(rows, alone, strict=True)):
            generator = torch.Generator().manual_seed(step * 3 + (0 if learner == 2 else learner))
            for ours, theirs in zip(row.parameters(), single.parameters(), strict=True):
                ours.grad = torch.randn(ours.shape, generator=generator)
                theirs.grad = ours.grad.clone()
        for optimizer in (together, *singles):
            optimizer.step()
    for row, model, single in zip(rows, alone, singles, strict=True):
        for ours, theirs in zip(row.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            for name, value in single.state[theirs].items():
                assert torch.equal(together.state[ours][name], value), name
    for one, two in zip(rows[0].parameters(), rows[2].parameters(), strict=True):
        assert torch.equal(one, two)


def trained(make: Any, strategy: Any, mix_first: bool) -> nn.Module:
    """Two learners that start alike and get different data; ``mix_first``: a scaled loss forbids one pass."""
    model = net()
    optimizer = make(model.parameters())
    handle = ddpcore.distribute(model, optimizer, strategy, learners=2)
    for step in range(4):
        inputs = torch.randn(2, 8, 60, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        handle.model(inputs).square().mean(dim=(1, 2)).sum().backward()
        if mix_first:
            optimizer.found_inf = torch.zeros(1)
        optimizer.step()
    return handle


@every
def test_an_average_with_neighbours_and_the_step(make):
    """Gossip takes two passes: it has the bits of the run in which nothing allows one pass."""
    runs = [trained(make, ddpcore.DPSGD(ddpcore.Complete()), mix_first) for mix_first in (False, True)]
    for one, two in zip(runs[0].models, runs[1].models, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    ssgd = trained(make, ddpcore.SSGD(), False)
    first, second = ssgd.models
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@every
def test_skipped_steps_draw_nothing(make):
    """Steps with an overflow are not counted, so the next one has the bits that they would have had."""
    models = [net(), net()]
    optimizers = [make(model.parameters()) for model in models]
    take_steps(models[0], optimizers[0], range(3))
    for step in range(3):
        optimizers[1].found_inf = torch.ones(1)
        take_steps(models[1], optimizers[1], range(50, 51))
        optimizers[1].found_inf = torch.zeros(1)
        take_steps(models[1], optimizers[1], range(step, step + 1))
    assert_same((models[0], optimizers[0]), (models[1], optimizers[1]))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(torch.optim.SGD, FusedSGD), (torch.optim.AdamW, FusedAdamW), (torch.optim.Adam, FusedLAMB)],
)
def test_states_of_torch_are_rounded_to_nearest_and_go_back(theirs, ours):
    model = net()
    momentum = {"momentum": 0.9} if theirs is torch.optim.SGD else {}
    before = theirs(model.parameters(), lr=0.01, **momentum)
    take_steps(model, before, range(3))
    optimizer = ours(model.parameters(), lr=0.01, **BF16)
    optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    assert optimizer.param_groups[0]["state_dtype"] == "bfloat16", "torch has no such option"
    for state, own in zip(states(before), states(optimizer), strict=True):
        for name in (name for name in own if name != "step"):
            assert torch.equal(own[name], state[name].bfloat16())
    take_steps(model, optimizer, range(3, 5))
    after = theirs(model.parameters(), lr=0.01, **momentum)
    after.load_state_dict(optimizer.state_dict())
    for state, own in zip(states(after), states(optimizer), strict=True):
        for name in (name for name in own if name != "step"):
            assert state[name].dtype == torch.float32 and torch.equal(own[name].float(), state[name])
    take_steps(model, after, range(5, 6))


@every
def test_an_option_that_changes_between_steps(make):
    """The states are converted: exactly to float32, and to the nearest number back."""
    model = net()
    optimizer = make(model.parameters(), state_dtype="float32")
    take_steps(model, optimizer, range(2))
    before = copy.deepcopy(states(optimizer))
    optimizer.param_groups[0]["state_dtype"] = torch.bfloat16
    reference_model = net()
    reference_model.load_state_dict(model.state_dict())
    reference = make(reference_model.parameters())
    for state in before:
        state.update({name: value.bfloat16() for name, value in state.items() if name != "step"})
    groups = [{**reference.state_dict()["param_groups"][0], "state_dtype": "bfloat16"}]
    reference.load_state_dict({"state": dict(enumerate(before)), "param_groups": groups})
    take_steps(model, optimizer, range(2, 4))
    take_steps(reference_model, reference, range(2, 4))
    assert_same((model, optimizer), (reference_model, reference))
    optimizer.param_groups[0]["state_dtype"] = "float32"
    take_steps(model, optimizer, range(4, 5))
    assert all(value.dtype == torch.float32 for state in states(optimizer) for value in state.values())


def test_without_momentum_there_is_nothing_to_round():
    models = [net(), net()]
    optimizers = [FusedSGD(models[0].parameters(), **BF16), FusedSGD(models[1].parameters())]
    for model, optimizer in zip(models, optimizers, strict=True):
        take_steps(model, optimizer, range(3))
    assert_same((models[0], optimizers[0]), (models[1], optimizers[1]))
    assert not optimizers[0].state


def test_a_parameter_that_joins_leaves_the_bits_of_the_others():
    """It has the next number."""
    models = [net(), net()]
    weights = [list(model.parameters()) for model in models]
    late, full = FusedAdamW(weights[0][:3], **BF16), FusedAdamW(weights[1], **BF16)
    take_steps(models[0], late, range(2))
    take_steps(models[1], full, range(2))
    late.add_param_group({"params": weights[0][3:]})
    take_steps(models[0], late, range(2, 3))
    take_steps(models[1], full, range(2, 3))
    for one, two in zip(weights[0][:3], weights[1][:3], strict=True):
        assert torch.equal(one, two) and torch.equal(late.state[one]["exp_avg"], full.state[two]["exp_avg"])


def test_the_option_as_text():
    optimizer = build_optimizer("lamb", net(), lr=0.1, options={"state_dtype": "bfloat16"})
    assert optimizer.param_groups[0]["state_dtype"] == "bfloat16"
    with pytest.raises(ValueError, match="optimizer sgd: state_dtype is bfloat61: it must be float32 or bfloat16"):
        build_optimizer("sgd", net(), lr=0.1, options={"state_dtype": "bfloat61"})


@pytest.mark.parametrize("value", [torch.float16, torch.float64, None, 16])
@every
def test_other_dtypes_are_refused(make, value):
    with pytest.raises(ValueError, match=r"state_dtype is [\w.]+: it must be float32 or bfloat16"):
        make(net().parameters(), state_dtype=value)


MASTER = r"parameter 0.weight has a float32 master weight, .* leave out master_weights or state_dtype"


@every
def test_masters_contradict_and_nothing_is_changed(make):
    model = net(torch.float16)
    with pytest.raises(ValueError, match=MASTER):
        make(model.named_parameters(), master_weights=True)
    make(net().parameters(), master_weights=True)  # float32 weights need no masters
    optimizer = make(list(model.named_parameters())[2:])
    with pytest.raises(ValueError, match=MASTER):
        optimizer.add_param_group({"params": list(model.named_parameters())[:2], "master_weights": True})
    assert len(optimizer.param_groups) == 1

    with_masters = make(model.parameters(), master_weights=True, state_dtype=torch.float32)
    take_steps(model, with_masters, range(2))
    optimizer = make(model.named_parameters())
    take_steps(model, optimizer, range(1))
    state = copy.deepcopy(with_masters.state_dict())
    before = copy.deepcopy((optimizer.state_dict(), optimizer.param_groups))
    for options in ({"state_dtype": "bfloat16"}, {"state_dtype": "bfloat16", "master_weights": False}):
        state["param_groups"][0].update(options)
        with pytest.raises(ValueError, match=MASTER):
            optimizer.load_state_dict(state)
    assert repr(before) == repr((optimizer.state_dict(), optimizer.param_groups))

    optimizer.param_groups[0]["master_weights"] = True
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=MASTER):
        take_steps(model, optimizer, range(1))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert repr(before[0]["state"]) == repr(optimizer.state_dict()["state"])


@pytest.mark.parametrize("rule", MAKES)
def test_a_small_problem_ends_near_the_run_in_float64(rule):
    """Least squares with noisy gradients. The states' rounding errors, of a relative 2**-9 on average and without bias,
    move the loss far less than the noise of the gradients: by less than a tenth of the loss that is left.
    """
    losses = {}
    for name, dtype, option in (("bf16", torch.float32, "bfloat16"), ("exact", torch.float64, "float32")):
        torch.manual_seed(5)
        weights = nn.Parameter(torch.zeros(64, 16, dtype=dtype))
        optimizer = MAKES[rule](
            [weights],
            state_dtype=option,
            **({"lr": 0.3, "trust_coefficient": 0.02} if rule == "lars" else {"lr": 0.01}),
        )
        target = torch.randn(64, 16, dtype=torch.float64)
        for _ in range(400):
            inputs = torch.randn(32, 64, dtype=torch.float64)
            noise = torch.randn(32, 16, dtype=torch.float64)
            error = (inputs @ (weights.detach().double() - target) + noise) / 32
            weights.grad = (inputs.T @ error).to(dtype)
            optimizer.step()
        losses[name] = float((weights.detach().double() - target).square().mean())
    assert losses["exact"] < 0.5
    assert losses["bf16"] == pytest.approx(losses["exact"], rel=0.1)
