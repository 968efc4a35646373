"""Moments of an Adam that are averaged with periods of their own (DES-LOC), and under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore import DPSGD, LocalSGD, Policies, Ring
from ddpcore.optim import FusedAdamW, FusedLAMB, FusedSGD, Muon

KINDS = {"fused": FusedAdamW, "torch": torch.optim.AdamW}
NAMES = ("exp_avg", "exp_avg_sq")


def run(kind: Any, policies: Policies, strategy: Any, steps: int, learners: int = 3) -> tuple[Any, Any, list[Any]]:
    """Train on random data; returns the moments after each step, as ``{name: [learners, elements]}``."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = kind(model.parameters(), lr=0.01)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=learners, policies=policies)
    generator, seen = torch.Generator().manual_seed(2), []
    for _ in range(steps):
        optimizer.zero_grad()
        handle.model(torch.randn(learners, 8, 5, generator=generator)).square().sum().backward()
        optimizer.step()
        rows = {name: [[optimizer.state[p][name] for p in m.parameters()] for m in handle.models] for name in NAMES}
        seen.append({k: torch.stack([torch.cat([t.flatten() for t in row]) for row in v]) for k, v in rows.items()})
    return handle, optimizer, seen


def alike(rows: Tensor) -> bool:
    return bool((rows == rows[0]).all())


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_moment_is_averaged_in_its_own_period(kind):
    _, _, seen = run(kind, Policies(moments={"exp_avg": 2, "exp_avg_sq": 3}), LocalSGD(6), 12)
    assert [alike(rows["exp_avg"]) for rows in seen] == [step % 2 == 0 for step in range(1, 13)]
    assert [alike(rows["exp_avg_sq"]) for rows in seen] == [step % 3 == 0 for step in range(1, 13)]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_average_is_the_mean_and_keeps_the_count(kind):
    _, _, kept = run(kind, Policies(), LocalSGD(4), 2)
    _, optimizer, moved = run(kind, Policies(moments={"exp_avg_sq": 2}), LocalSGD(4), 2)
    mean = kept[1]["exp_avg_sq"].mean(0)
    torch.testing.assert_close(moved[1]["exp_avg_sq"], mean.expand_as(moved[1]["exp_avg_sq"]), rtol=1e-5, atol=1e-9)
    assert torch.equal(moved[1]["exp_avg"], kept[1]["exp_avg"])
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


@pytest.mark.parametrize("policy", ["average", "gossip"])
def test_momentum_policies_hold_for_both_moments(policy):
    _, _, kept = run(FusedAdamW, Policies(), DPSGD(Ring()), 1, learners=4)
    _, _, moved = run(FusedAdamW, Policies(momentum=policy), DPSGD(Ring()), 1, learners=4)
    for name in NAMES:
        matrix = torch.full((4, 4), 0.25).double() if policy == "average" else torch.from_numpy(Ring().matrix(0, 4))
        expected = matrix @ kept[0][name].double()
        torch.testing.assert_close(moved[0][name].double(), expected, rtol=1e-5, atol=1e-9)


class Valley(nn.Module):
    """One weight, and the gradient ``slope * (w - centre)`` that the learner's input says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        slope, centre = inputs
        return slope / 2 * (self.weight - centre).square()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_local_moments_alone_miss_the_minimum_and_averaged_ones_find_it(kind):
    """One learner pulls with slope 9 towards 1, one with slope 1 towards -1: the mean loss is least at 0.8.

    Each learner divides its gradient by the root of its own second moment, which makes both pulls equally strong. So
    the mean of their steps is zero at 0, and nearly so everywhere between the centres.
    """
    ends = {}
    for name, policies in {"local": Policies(), "averaged": Policies(moments={"exp_avg": 4, "exp_avg_sq": 16})}.items():
        model = Valley()
        optimizer = kind(model.parameters(), lr=0.02, weight_decay=0.0)
        handle = ddpcore.distribute(model, optimizer, LocalSGD(4), learners=2, policies=policies)
        inputs = torch.tensor([[9.0, 1.0], [1.0, -1.0]])
        for _ in range(400):
            optimizer.zero_grad()
            sum(one(row) for one, row in zip(handle.models, inputs, strict=True)).backward()
            optimizer.step()
        ends[name] = handle.evaluation_model().weight.item()
    assert abs(ends["local"] - 0.8) > 0.4
    assert abs(ends["averaged"] - 0.8) < 0.08


@pytest.mark.parametrize(
    ("kind", "options", "moments", "message"),
    [
        (
            FusedSGD,
            {"momentum": 0.9},
            {"exp_avg": 4},
            r"parameter \d.\w+ has no state 'exp_avg': FusedSGD keeps momentum_b",
        ),
        (FusedSGD, {"momentum": 0.0}, {"momentum_buffer": 4}, "'momentum_buffer': FusedSGD keeps none for it"),
        (FusedLAMB, {}, {"momentum_buffer": 4}, "FusedLAMB keeps exp_avg, exp_avg_sq for it, name one of these"),
        (torch.optim.SGD, {"momentum": 0.9}, {"exp_avg": 4}, "SGD keeps momentum_buffer for it"),
        (torch.optim.AdamW, {}, {"exp_av": 4}, "AdamW keeps exp_avg, exp_avg_sq for it"),
    ],
)
def test_a_period_of_a_state_that_is_not_there_is_refused(kind, options, moments, message):
    model = nn.Sequential(nn.Linear(2, 2))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = kind(model.parameters(), lr=0.1, **options)
    with pytest.raises(ValueError, match=message):
        ddpcore.distribute(model, optimizer, LocalSGD(4), learners=2, policies=Policies(moments=moments))
    assert all(map(torch.equal, before, model.parameters())) and not optimizer.state
    ddpcore.distribute(model, optimizer, LocalSGD(4), learners=2)


def test_a_period_of_a_state_that_some_groups_keep():
    """Muon keeps moments in groups of AdamW alone, and momentum in the others. No group at all is refused."""
    model = nn.Sequential(nn.Linear(2, 2))
    (weight, bias), moments = model.parameters(), {"exp_avg": 2, "momentum_buffer": 1}
    optimizer = Muon([{"params": [weight]}, {"params": [bias], "rule": "adamw"}], lr=0.1)
    handle = ddpcore.distribute(model, optimizer, LocalSGD(4), learners=2, policies=Policies(moments=moments))
    for _ in range(2):
        handle.model(torch.randn(2, 3, 2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [optimizer.state[parameter] for one in handle.models for parameter in one.parameters()]
    assert torch.equal(states[0]["momentum_buffer"], states[2]["momentum_buffer"])
    assert torch.equal(states[1]["exp_avg"], states[3]["exp_avg"])
    assert not torch.equal(states[1]["exp_avg_sq"], states[3]["exp_avg_sq"])
    alone = nn.Sequential(nn.Linear(2, 2, bias=False))
    with pytest.raises(ValueError, match=r"parameter 0.weight has no state 'exp_avg': Muon keeps momentum_buffer for"):
        ddpcore.distribute(
            alone, Muon(alone.parameters()), LocalSGD(4), learners=2, policies=Policies(moments={"exp_avg": 2})
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moments": {"exp_avg": 0}}, "the period of exp_avg is 0: it must be 1 or more steps"),
        ({"moments": {"exp_avg": 2.0}}, "the period of exp_avg is 2.0"),
        ({"moments": "exp_avg"}, "policy moments is 'exp_avg': give a period by name"),
        ({"moments": {"exp_avg": 2}, "momentum": "average"}, "momentum='average' and moments both average the same"),
    ],
)
def test_bad_periods(options, message):
    with pytest.raises(ValueError, match=message):
        Policies(**options)


def test_periods_are_a_copy() -> None:
    periods = {"exp_avg": 2}
    policies = Policies(moments=periods)
    periods["exp_avg"] = 1000
    assert policies.moments == {"exp_avg": 2}
