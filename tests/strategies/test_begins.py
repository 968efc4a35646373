"""Learners that begin with different weights, as after a program has loaded a state into each of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from helpers import ranks

N = 3


def run(strategy: ddpcore.Strategy, steps: int, *, different: bool = True) -> tuple[Tensor, Tensor]:
    """The weights ``[N, P]`` at the start and at the end, of steps whose gradients are zero."""
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=N)
    with torch.no_grad():
        for parameter in handle.model.parameters() if different else ():
            parameter.normal_()
    start = handle.learner.flat.param_LP.clone()
    for _ in range(steps):
        optimizer.zero_grad()
        (0 * handle.model(torch.ones(N, 2, 5))).sum().backward()
        optimizer.step()
    return start, handle.learner.flat.param_LP


@pytest.mark.parametrize(
    "make",
    [
        lambda: ddpcore.SlowMo(ddpcore.DPSGD(ddpcore.Ring()), period=2),
        lambda: ddpcore.LocalSGD(2, outer={"lr": 0.7, "momentum": 0.9}),
        lambda: ddpcore.LocalSGD(2, outer={"lr": 0.7}, fragments=2),
    ],
)
def test_outer_steps_begin_at_the_mean(make: Callable[[], ddpcore.Strategy]) -> None:
    """Each rank would take its own weights for those of all, and virtual learners those of learner 0."""
    for steps in (2, 8):
        start, end = run(make(), steps)
        torch.testing.assert_close(end, start.mean(dim=0).expand_as(end))


def test_outer_steps_do_not_begin_at_a_learner_that_is_gone() -> None:
    """It died, and then the program gave all others equal weights, as of a pretrained model."""
    for strategy in (ddpcore.LocalSGD(2, outer={"lr": 0.7}), ddpcore.SlowMo(ddpcore.DPSGD(ddpcore.Ring()), period=2)):
        model = nn.Linear(5, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        connection = ddpcore.Connection(on_failure="shrink")
        handle = ddpcore.distribute(model, optimizer, strategy, learners=4, connection=connection)
        handle.lose(0)
        for parameter in (one for model in handle.models[1:] for one in model.parameters()):
            nn.init.constant_(parameter, 7.0)
        for _ in range(4):
            optimizer.zero_grad()
            (0 * handle.model(torch.ones(4, 2, 5))).sum().backward()
            optimizer.step()
        for parameter in (one for model in handle.models[1:] for one in model.parameters()):
            torch.testing.assert_close(parameter, torch.full_like(parameter, 7.0))


def test_ranks_agree() -> None:
    """A neighbour would take its own weights for those of a rank, and the difference would stay for ever.

    Where rank 0 halves its weights before the first step, the change of the first round has that.
    """
    seen = ranks.run("begin_ranks", 2)
    for name in seen[0]:
        starts = [rank[name][0] for rank in seen]
        ends = anchors = [sum(starts) / 2] * 2
        if name.startswith("decayed"):
            anchors = starts if name == "decayed noloco" else anchors  # and the mean over ranks for GASLoC
            ends = [(anchor + (starts[0] / 2 + starts[1]) / 2) / 2 for anchor in anchors]
        for rank, end in zip(seen, ends, strict=True):
            torch.testing.assert_close(rank[name][1], end, atol=1e-3, rtol=1e-3, msg=name)


@pytest.mark.parametrize("make", [lambda: ddpcore.SlowMo(period=2), lambda: ddpcore.LocalSGD(2, outer={"lr": 1.0})])
def test_equal_weights_keep_their_bits(make: Callable[[], ddpcore.Strategy]) -> None:
    """The mean of three equal numbers may be another one."""
    strategy = make()
    start, _ = run(strategy, 1, different=False)
    assert torch.equal(torch.cat(strategy.state_dict()["anchor"]["parts"]), start[0])
    assert not torch.equal(start.sum(dim=0) / 3, start[0])


class Swapped(nn.Module):
    """Registers its layers in another order than it runs them. ``max_norm`` changes weights in a forward pass."""

    def __init__(self, max_norm: float | None) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(12, 3), nn.Embedding(10, 6, max_norm=max_norm)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs).flatten(1)).square()


def _samples(step: int) -> Tensor:
    return torch.randint(10, (4, 5, 2), generator=torch.Generator().manual_seed(step))


def _plain(models: list[nn.Module], way: str, group: int, switch: int) -> Tensor:
    """The weights of a plain loop of six steps, after rounds of two steps with an outer rate of 0.5."""
    rows = list(zip(*(model.parameters() for model in models), strict=True))
    for step in range(6):
        if step == switch:
            anchor = [own[0].detach().clone() for own in rows]
        for model, inputs in zip(models, _samples(step), strict=True):
            model.zero_grad()
            model(inputs).sum().backward()
        size = group if step >= switch else len(models)
        with torch.no_grad():
            for own in rows:
                means = [torch.stack([one.grad for one in own[i : i + size]]).mean(0) for i in range(0, 4, size)]
                for place, one in enumerate(own):
                    one.mul_(0.9 if way == "decay" else 1.0).sub_(means[place // size], alpha=0.1)
            if step >= switch and (step - switch) % 2:
                for phi, own in zip(anchor, rows, strict=True):
                    phi.lerp_(torch.stack(own).mean(0), 0.5)
                    for one in own:
                        one.copy_(phi)
    return nn.utils.parameters_to_vector(models[0].parameters()).detach()


def _ours(model: nn.Module, make: Callable[[], Any], way: str) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, make(), learners=4)
    if way in ("loaded", "set"):  # after a pass that tries the model out
        state = {name: value * 0.5 for name, value in model.state_dict().items()}
        handle.model(_samples(9))
        for one in handle.models:
            if way == "loaded":
                one.load_state_dict(state)
            else:
                torch._foreach_mul_([parameter.detach() for parameter in one.parameters()], 0.5)
    for step in range(6):
        optimizer.zero_grad()
        losses = handle.model(_samples(step)).sum(dim=(1, 2))
        if way == "resumed" and step == 0:
            state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
            model = Swapped(1.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            handle = ddpcore.distribute(model, optimizer, make(), learners=4)
            handle.load_state_dict(state[2])
            model.load_state_dict(state[0])
            losses = handle.model(_samples(step)).sum(dim=(1, 2))
        handle.backward(losses)
        if way == "decay":
            with torch.no_grad():
                for parameter in handle.model.parameters():
                    parameter.mul_(0.9)
        optimizer.step()
    return model, handle


def test_the_first_round_begins_before_the_passes_of_its_step() -> None:
    """Not where a loop, or an embedding in its forward pass, has changed the weights before the step."""
    full, half = ddpcore.Complete(), {"lr": 0.5}
    gossip = {"period": 2, "outer_lr": 0.5, "outer_momentum": 0.0}
    cases: dict[str, tuple[Callable[[], Any], int, int]] = {
        "diloco": (lambda: ddpcore.LocalSGD(2, outer=half), 1, 0),
        "fragments": (lambda: ddpcore.LocalSGD(2, outer=half, fragments=[["first", "last"]]), 1, 0),
        "group": (lambda: ddpcore.LocalSGD(2, outer=half, group=2), 2, 0),
        "switch": (lambda: ddpcore.LocalSGD(2, outer=half, switch_step=2), 1, 2),
        "group and switch": (lambda: ddpcore.LocalSGD(2, outer=half, switch_step=2, group=2), 2, 2),
        "noloco": (lambda: ddpcore.NoLoCo(full, **gossip), 1, 0),
        "noloco of groups": (lambda: ddpcore.NoLoCo(full, **gossip, group=2), 2, 0),
        "gasloc": (lambda: ddpcore.GASLoC(full, **gossip), 1, 0),
        "gasloc of groups": (lambda: ddpcore.GASLoC(full, **gossip, group=2), 2, 0),
        "slowmo": (lambda: ddpcore.SlowMo(None, period=2, slow_momentum=0.0, slow_lr=0.5), 1, 0),
    }
    for name, (make, group, switch) in cases.items():
        for way in ("plain", "decay", "max_norm", "resumed", "loaded", "set"):
            renormalizes = way in ("max_norm", "resumed")
            if renormalizes and (group > 1 or switch):
                continue  # learners that average gradients would differ
            torch.manual_seed(0)
            model = Swapped(1.0 if renormalizes else None)
            alone = [copy.deepcopy(model) for _ in range(4)]
            for one in alone if way in ("loaded", "set") else ():
                one.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
            expected = _plain(alone, way, group, switch)
            trained, _ = _ours(model, make, way)
            found = nn.utils.parameters_to_vector(trained.parameters()).detach()
            torch.testing.assert_close(found, expected, msg=lambda text, case=(name, way): f"{case}: {text}")
